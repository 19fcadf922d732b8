"""The load role: one warp that brings K, V, Q, dO, LSE and delta into shared memory.

K, V, Q and dO end exactly where their sequence does (`forward.views.keys`): TMA fills the rest with
zeros, because P and dS are 0 there and 0 * NaN is not.
"""

from __future__ import annotations

from typing import Any

from cutlass import const_expr, cute
from cutlass.cute.nvgpu import cpasync

from fa4core.forward.tma import Operand
from fa4core.pipeline.effects import Fixed, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.pipeline.loop import range
from fa4core.sm100.backward.spec import TILE, Spec


@cute.jit
def load(work: Any, plan: Any, ends: Ends):
    """K Q0 V dO0 Q1 dO1 ..., each Q with its block's LSE and delta; V if dK is computed."""
    k, k_free = ends.posts("k_full"), ends.waits("k_empty")
    v, v_free = ends.posts("v_full", optional=True), ends.waits("v_empty", optional=True)
    q, q_free = ends.posts("q_full"), ends.waits("q_empty")
    do, do_free = ends.posts("do_full"), ends.waits("do_empty")
    rows = ends.posts("rows_full")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        if item.blocks > 0:
            k_free.take()
            work.load_k(item, barrier=k.expect(work.k_bytes))
        waiting = work.with_k
        for r in range(item.first_run, item.end_run):
            run = plan.run(r)
            head = item.h + run.head
            for i in range(run.first, run.end, unroll=1):
                q_free.take()
                work.load_q(item, head, i, q.stage, barrier=q.expect(work.q_bytes))
                q.advance()
                work.load_rows(item, head, i, rows.stage, barrier=rows.expect(work.row_bytes))
                rows.advance()
                if const_expr(work.with_k):
                    if waiting:
                        v_free.take()
                        work.load_v(item, barrier=v.expect(work.v_bytes))
                        waiting = False
                do_free.take()
                work.load_do(item, head, i, barrier=do.expect(work.do_bytes))
        index = source.next(index)
    k_free.drain()
    v_free.drain()
    q_free.drain()
    do_free.drain()


class LoadWork(Fixed):
    """Copies of one tile each.

    Attributes:
        operands: By "k", "v", "q" and "do".
        lse, delta: (rows, heads_q) in global memory, padded.
        rows: (queries, {LSE, delta}, stage) in shared memory.
    """

    def __init__(self, spec: Spec, operands: dict[str, Operand], lse, delta, rows):
        self.spec, self.operands, self.rows = spec, operands, rows
        self.lse, self.delta = lse, delta
        self.with_k, self.queries = spec.with_k, spec.queries
        self.k_bytes, self.q_bytes = TILE * spec.d * 2, spec.queries * spec.d * 2
        self.v_bytes, self.do_bytes = TILE * spec.d_v * 2, spec.queries * spec.d_v * 2
        self.row_bytes = 2 * spec.queries * 4

    @touches(lambda item, barrier: (writes("k"),), unit="tma")
    def load_k(self, item: Any, barrier: Any) -> None:
        self._keys("k", item, self.spec.d, barrier)

    @touches(lambda item, barrier: (writes("v"),), unit="tma")
    def load_v(self, item: Any, barrier: Any) -> None:
        self._keys("v", item, self.spec.d_v, barrier)

    def _keys(self, name: str, item: Any, columns: int, barrier: Any) -> None:
        operand = self.operands[name]
        there, row = operand.rows(
            item.b_k, item.h_kv, item.start_k, item.seqlen_k, item.tile * TILE
        )
        operand.load(there, (row, 0), (TILE, columns), (0, 0), barrier)

    @touches(lambda item, head, i, stage, barrier: (writes("q", stage),), unit="tma")
    def load_q(self, item: Any, head: Any, i: Any, stage: Any, barrier: Any) -> None:
        self._queries("q", item, head, i, self.spec.d, stage, barrier)

    @touches(lambda item, head, i, barrier: (writes("do"),), unit="tma")
    def load_do(self, item: Any, head: Any, i: Any, barrier: Any) -> None:
        self._queries("do", item, head, i, self.spec.d_v, 0, barrier)

    def _queries(
        self, name: str, item: Any, head: Any, i: Any, columns: int, stage: Any, barrier: Any
    ) -> None:
        operand = self.operands[name]
        there, row = operand.rows(item.b_q, head, item.start_q, item.seqlen_q, i * self.queries)
        operand.load(there, (row, 0), (self.queries, columns), (0, stage), barrier)

    @touches(lambda item, head, i, stage, barrier: (writes("rows", stage),), unit="tma")
    def load_rows(self, item: Any, head: Any, i: Any, stage: Any, barrier: Any) -> None:
        """LSE and delta of a block's queries: padded, so that they are always all there."""
        _load_rows(self, head, item.rows_q + i * self.queries, stage, barrier)


@cute.jit
def _load_rows(work: Any, head: Any, first: Any, stage: Any, barrier: Any):
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), work.rows.element_type)
    with cute.arch.elect_one():
        for number, tensor in enumerate((work.lse, work.delta)):
            of = cute.local_tile(cute.domain_offset((first,), tensor[None, head]), (work.queries,), (0,))
            cute.copy(atom, of, work.rows[None, number, stage], mbar_ptr=barrier)
