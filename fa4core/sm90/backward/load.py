"""The load role: one warp that brings K, V, Q and dO, and the rows' LSE and delta.

The only role that knows where sequences lie; how rows behind a sequence are left out is said in
`fa4core.forward.views`.
"""

from __future__ import annotations

from typing import Any

from cutlass import cute

from fa4core.lowering.cute import select
from fa4core.pipeline.effects import Fixed, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.sm90.backward.spec import ROWS, Spec
from fa4core.sm90.memory import partition


@cute.jit
def load(work: Any, plan: Any, ends: Ends):
    """K and V once for a work tile; Q and dO for every query tile that it visits.

    The first Q is loaded ahead, while consumers still work on the tile before; K has to wait until
    they have stored dK and dV.
    """
    kv, kv_free = ends.posts("kv_full"), ends.waits("kv_empty")
    q, q_free = ends.posts("q_full"), ends.waits("q_empty")
    out, out_free = ends.posts("grad_out_full"), ends.waits("grad_out_empty")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        if item.blocks > 0:
            begin = plan.run(item.first_run)
            q_free.wait()
            work.load_q(item, begin, begin.first, q.stage, barrier=q.expect(work.q_bytes))
            q.advance()
            q_free.advance()
        kv_free.wait()
        work.load_keys(item, barrier=kv.expect(work.kv_bytes))
        kv_free.advance()
        done = 1
        for r in range(item.first_run, item.end_run):
            run = plan.run(r)
            for j in range(run.first, run.end):
                if done == 0:
                    q_free.wait()
                    work.load_q(item, run, j, q.stage, barrier=q.expect(work.q_bytes))
                    q.advance()
                    q_free.advance()
                done = 0
                out_free.wait()
                work.load_out(item, run, j, out.stage, barrier=out.expect(work.out_bytes))
                out.advance()
                out_free.advance()
        index = source.next(index)


class LoadWork(Fixed):
    """TMA copies of one tile each.

    Attributes:
        operands: "k", "v", "q", "grad_out" to (copy atom, coordinate tensor, shared memory), as
            `kernel` makes them.
        rows: "lse", "delta" to (copy atom, (heads, rows) in global memory, (queries, stages) in
            shared memory).
    """

    def __init__(self, spec: Spec, operands: dict[str, tuple], rows: dict[str, tuple]):
        self.tiles, self.queries = tuple(range(spec.tiles)), spec.queries
        self.operands, self.rows = operands, rows
        rows_of = {"k": ROWS, "v": ROWS, "q": spec.queries, "grad_out": spec.queries}
        self.shapes = {name: (n, spec.loaded[name]) for name, n in rows_of.items()}
        k_bytes, v_bytes, q_bytes, out_bytes = (2 * a * b for a, b in self.shapes.values())
        self.kv_bytes = (k_bytes + v_bytes) * spec.tiles
        self.q_bytes, self.out_bytes = (n + 4 * spec.queries for n in (q_bytes, out_bytes))

    @touches(lambda item, barrier: (writes("k"), writes("v")), unit="tma")
    def load_keys(self, item: Any, barrier: Any) -> None:
        for t in self.tiles:
            row = (item.tile * len(self.tiles) + t) * ROWS
            # A key tile behind the last one gets the first: on an H200, a box that lies outside its
            # tensor altogether ends in an illegal address where memory before it is unmapped.
            row = select(row < item.seqlen_k, row, 0, "int")
            for name in ("k", "v"):
                place = (row, item.seqlen_k, item.start_k, item.h_kv, item.b_k)
                self._copy(name, *place, t, barrier)

    @touches(lambda item, run, j, stage, barrier: (writes("q", stage), writes("lse", stage)), "tma")
    def load_q(self, item: Any, run: Any, j: Any, stage: Any, barrier: Any) -> None:
        self._load_queries("q", "lse", item, run, j, stage, barrier)

    @touches(
        lambda item, run, j, stage, barrier: (writes("grad_out", stage), writes("delta", stage)),
        unit="tma",
    )
    def load_out(self, item: Any, run: Any, j: Any, stage: Any, barrier: Any) -> None:
        self._load_queries("grad_out", "delta", item, run, j, stage, barrier)

    def _load_queries(
        self, name: str, of_rows: str, item: Any, run: Any, j: Any, stage: Any, barrier: Any
    ) -> None:
        head, row = item.h + run.head, j * self.queries
        self._copy(name, row, item.seqlen_q, item.start_q, head, item.b_q, stage, barrier)
        atom, source, shared = self.rows[of_rows]
        tile = item.rows_q // self.queries + j
        source = cute.local_tile(source[(head, None)], (self.queries,), (tile,))
        with cute.arch.elect_one():
            cute.copy(atom, source, shared[(None, stage)], mbar_ptr=barrier)

    def _copy(
        self, name: str, row: Any, length: Any, start: Any, h: Any, b: Any, stage: Any, barrier: Any
    ) -> None:
        atom, source, shared = self.operands[name]
        to, of = partition(atom, shared, source, self.shapes[name], 0, row, length, start, h, b)
        cute.copy(atom, of, to[(None, stage)], tma_bar_ptr=barrier)
