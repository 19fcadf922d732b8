"""The load role: one warp that brings Q, K and V into shared memory by TMA.

The only role that knows where sequences lie; how rows behind a sequence are left out is said in
`fa4core.forward.views`.
"""

from __future__ import annotations

from typing import Any

from cutlass import cute

from fa4core.lowering.cute import select
from fa4core.pipeline.effects import Fixed, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.sm90.forward.spec import ROWS, Spec
from fa4core.sm90.memory import partition


@cute.jit
def load(work: Any, plan: Any, ends: Ends):
    """K and V block by block, K0 V0 K1 V1 ..., with Q of every consumer behind K0.

    K0 is loaded ahead, while the consumers still work on the tile before; Q has to wait for them.
    """
    in_q = ends.inside("rows", "q")
    q, q_free = ends.posts("q_full"), ends.waits("q_empty")
    k, k_free = ends.posts("k_full"), ends.waits("k_empty")
    v, v_free = ends.posts("v_full"), ends.waits("v_empty")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        if item.blocks > 0:
            begin = plan.run(item.first_run)
            k_free.wait()
            work.load_k(item, begin.first, k.stage, barrier=k.expect(work.k_bytes))
            k.advance()
            k_free.advance()
        if (item.blocks > 0) | in_q:
            for t in work.tiles:
                q_free.wait(t)
                work.load_q(item, t, barrier=q.expect(work.q_bytes, t))
            q_free.advance()
        done = 1
        for r in range(item.first_run, item.end_run):
            run = plan.run(r)
            for j in range(run.first, run.end):
                if done == 0:
                    k_free.wait()
                    work.load_k(item, j, k.stage, barrier=k.expect(work.k_bytes))
                    k.advance()
                    k_free.advance()
                done = 0
                v_free.wait()
                work.load_v(item, j, v.stage, barrier=v.expect(work.v_bytes))
                v.advance()
                v_free.advance()
        index = source.next(index)


class LoadWork(Fixed):
    """TMA copies of one tile each.

    `operands` maps "q", "k", "v" to (copy atom, coordinate tensor, shared memory), as `kernel`
    makes them.
    """

    def __init__(self, spec: Spec, operands: dict[str, tuple]):
        self.tiles, self.keys = tuple(range(spec.tiles)), spec.keys
        self.operands = operands
        self.shapes = {"q": (ROWS, spec.d), "k": (spec.keys, spec.d), "v": (spec.d_v, spec.keys)}
        self.q_bytes, self.k_bytes, self.v_bytes = (2 * a * b for a, b in self.shapes.values())

    @touches(lambda item, t, barrier: (writes("q", t),), unit="tma")
    def load_q(self, item: Any, t: Any, barrier: Any) -> None:
        row = (item.tile * len(self.tiles) + t) * ROWS
        # A query tile behind the last one gets the first: on an H200, a box that lies outside its
        # tensor altogether ends in an illegal address where memory before the tensor is unmapped.
        row = select(row < item.seqlen_q, row, 0, "int")
        self._copy("q", row, item.seqlen_q, item.start_q, item.h, item.b_q, t, barrier)

    @touches(lambda item, j, stage, barrier: (writes("k", stage),), unit="tma")
    def load_k(self, item: Any, j: Any, stage: Any, barrier: Any) -> None:
        place = (j * self.keys, item.seqlen_k, item.start_k, item.h_kv, item.b_k)
        self._copy("k", *place, stage, barrier)

    @touches(lambda item, j, stage, barrier: (writes("v", stage),), unit="tma")
    def load_v(self, item: Any, j: Any, stage: Any, barrier: Any) -> None:
        place = (j * self.keys, item.seqlen_k, item.start_k, item.h_kv, item.b_k)
        self._copy("v", *place, stage, barrier)

    def _copy(
        self, name: str, row: Any, length: Any, start: Any, h: Any, b: Any, stage: Any, barrier: Any
    ) -> None:
        atom, source, shared = self.operands[name]
        axis = 1 if name == "v" else 0
        to, of = partition(atom, shared, source, self.shapes[name], axis, row, length, start, h, b)
        cute.copy(atom, of, to[(None, stage)], tma_bar_ptr=barrier)
