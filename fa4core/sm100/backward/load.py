"""The load role: one warp that brings K, V, Q, dO, LSE and delta into shared memory.

Each CTA of a pair brings half of the rows of Q and dO, and half of the columns of all their rows,
and of the keys of both.

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
from fa4core.sm100.backward.spec import Spec
from fa4core.sm100.backward.tiles import TILE


@cute.jit
def load(work: Any, plan: Any, ends: Ends):
    """K Q0 V dO0 Q1 dO1 ..., each Q with its block's LSE and delta; V if dK is computed; for a
    pair, columns of K, Q and dO behind dO."""
    k, k_free = ends.posts("k_full"), ends.waits("k_empty")
    v, v_free = ends.posts("v_full", optional=True), ends.waits("v_empty", optional=True)
    q, q_free = ends.posts("q_full"), ends.waits("q_empty")
    do, do_free = ends.posts("do_full"), ends.waits("do_empty")
    rows = ends.posts("rows_full")
    k_columns, k_columns_free = _columns(ends, "k")
    q_columns, q_columns_free = _columns(ends, "q")
    do_columns, do_columns_free = _columns(ends, "do")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        if item.blocks > 0:
            k_free.take()
            work.load_k(item, barrier=k.expect(work.k_bytes))
        waiting = True
        for r in range(item.first_run, item.end_run):
            run = plan.run(r)
            head = item.h + run.head
            for i in range(run.first, run.end, unroll=1):
                q_free.take()
                work.load_q(item, head, i, q.stage, barrier=q.expect(work.q_bytes))
                q.advance()
                work.load_rows(item, head, i, rows.stage, barrier=rows.expect(work.row_bytes))
                rows.advance()
                if const_expr(work.with_k):  # noqa: SIM102 (when compiling)
                    if waiting:
                        v_free.take()
                        work.load_v(item, barrier=v.expect(work.v_bytes))
                do_free.take()
                work.load_do(item, head, i, barrier=do.expect(work.do_bytes))
                if const_expr(work.pair):
                    do_columns_free.take()
                    barrier = do_columns.expect(work.do_bytes)
                    work.load_do_columns(item, head, i, barrier=barrier)
                    if waiting:
                        k_columns_free.take()
                        work.load_k_columns(item, barrier=k_columns.expect(work.k_bytes))
                    q_columns_free.take()
                    barrier = q_columns.expect(work.q_bytes)
                    work.load_q_columns(item, head, i, barrier=barrier)
                waiting = False
        index = source.next(index)
    k_free.drain()
    v_free.drain()
    q_free.drain()
    do_free.drain()
    k_columns_free.drain()
    q_columns_free.drain()
    do_columns_free.drain()


def _columns(ends: Ends, name: str) -> tuple[Any, Any]:
    full, empty = (f"{name}_columns_{state}" for state in ("full", "empty"))
    return ends.posts(full, optional=True), ends.waits(empty, optional=True)


class LoadWork(Fixed):
    """Copies of one tile each.

    Attributes:
        operands: By "k", "v", "q", "do" and, for a pair, "k_columns", "q_columns", "do_columns".
        lse, delta: (rows, heads_q) in global memory, padded.
        rows: (queries, {LSE, delta}, stage) in shared memory.
        cta: Rank of the CTA in its pair.
    """

    def __init__(self, spec: Spec, operands: dict[str, Operand], lse, delta, rows, cta: Any):
        self.spec, self.operands, self.rows = spec, operands, rows
        self.lse, self.delta, self.cta = lse, delta, cta
        self.pair, self.with_k = spec.pair, spec.with_k
        self.k_bytes, self.v_bytes = TILE * spec.d * 2, TILE * spec.d_v * 2
        self.q_bytes, self.do_bytes = spec.rows * spec.d * 2, spec.rows * spec.d_v * 2
        self.row_bytes = 2 * spec.queries * 4

    @touches(lambda item, barrier: (writes("k"),), unit="tma")
    def load_k(self, item: Any, barrier: Any) -> None:
        self._keys("k", item, item.tile * TILE, 0, (TILE, self.spec.d), barrier)

    @touches(lambda item, barrier: (writes("k_columns"),), unit="tma")
    def load_k_columns(self, item: Any, barrier: Any) -> None:
        columns = self.spec.d // 2
        first = (item.tile - self.cta) * TILE
        self._keys("k_columns", item, first, self.cta * columns, (2 * TILE, columns), barrier)

    @touches(lambda item, barrier: (writes("v"),), unit="tma")
    def load_v(self, item: Any, barrier: Any) -> None:
        self._keys("v", item, item.tile * TILE, 0, (TILE, self.spec.d_v), barrier)

    def _keys(
        self, name: str, item: Any, first: Any, column: Any, shape: tuple[int, int], barrier: Any
    ) -> None:
        operand = self.operands[name]
        there, row = operand.rows(item.b_k, item.h_kv, item.start_k, item.seqlen_k, first)
        operand.load(there, (row, column), shape, (0, 0), barrier)

    @touches(lambda item, head, i, stage, barrier: (writes("q", stage),), unit="tma")
    def load_q(self, item: Any, head: Any, i: Any, stage: Any, barrier: Any) -> None:
        self._queries("q", item, head, i, self.spec.d, stage, barrier)

    @touches(lambda item, head, i, barrier: (writes("q_columns"),), unit="tma")
    def load_q_columns(self, item: Any, head: Any, i: Any, barrier: Any) -> None:
        self._query_columns("q_columns", item, head, i, self.spec.d // 2, barrier)

    @touches(lambda item, head, i, barrier: (writes("do"),), unit="tma")
    def load_do(self, item: Any, head: Any, i: Any, barrier: Any) -> None:
        self._queries("do", item, head, i, self.spec.d_v, 0, barrier)

    @touches(lambda item, head, i, barrier: (writes("do_columns"),), unit="tma")
    def load_do_columns(self, item: Any, head: Any, i: Any, barrier: Any) -> None:
        self._query_columns("do_columns", item, head, i, self.spec.d_v // 2, barrier)

    def _queries(
        self, name: str, item: Any, head: Any, i: Any, columns: int, stage: Any, barrier: Any
    ) -> None:
        operand, rows = self.operands[name], self.spec.rows
        first = i * self.spec.queries + self.cta * rows
        there, row = operand.rows(item.b_q, head, item.start_q, item.seqlen_q, first)
        operand.load(there, (row, 0), (rows, columns), (0, stage), barrier)

    def _query_columns(
        self, name: str, item: Any, head: Any, i: Any, columns: int, barrier: Any
    ) -> None:
        """All rows of a block, and the CTA's half of the columns."""
        operand, queries = self.operands[name], self.spec.queries
        there, row = operand.rows(item.b_q, head, item.start_q, item.seqlen_q, i * queries)
        operand.load(there, (row, self.cta * columns), (queries, columns), (0, 0), barrier)

    @touches(lambda item, head, i, stage, barrier: (writes("rows", stage),), unit="tma")
    def load_rows(self, item: Any, head: Any, i: Any, stage: Any, barrier: Any) -> None:
        """LSE and delta of a block's queries: padded, so that they are always all there."""
        _load_rows(self, head, item.rows_q + i * self.spec.queries, stage, barrier)


@cute.jit
def _load_rows(work: Any, head: Any, first: Any, stage: Any, barrier: Any):
    atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), work.rows.element_type)
    queries = work.spec.queries
    with cute.arch.elect_one():
        for number, tensor in enumerate((work.lse, work.delta)):
            of = cute.local_tile(cute.domain_offset((first,), tensor[None, head]), (queries,), (0,))
            cute.copy(atom, of, work.rows[None, number, stage], mbar_ptr=barrier)
