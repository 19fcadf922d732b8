"""The load role: one warp that brings Q, K and V into shared memory by TMA.

The only role that knows where keys lie. K and V end exactly where their sequence does, whatever
follows it in memory (`views.keys`): TMA fills the rest with zeros, because P is 0 there and
0 * NaN is not.
"""

from __future__ import annotations

from typing import Any

import attrs
import cutlass
from cutlass import cute

from fa4core.lowering.cute import select
from fa4core.pipeline.effects import Fixed, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.pipeline.loop import range
from fa4core.sm100.forward.spec import TILE, Spec
from fa4core.sm100.forward.views import q_rows
from fa4core.sm100.tma import Operand


@cute.jit
def load(work: Any, plan: Any, ends: Ends):
    """K0 Q V0 K1 V1 ...: a work tile's Q may have to wait until the one before has used its own."""
    q, q_free = ends.posts("q_full"), ends.waits("q_empty")
    kv, kv_free = ends.posts("kv_full"), ends.waits("kv_empty")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        waiting = True
        for r in range(item.first_run, item.end_run):
            run = plan.run(r)
            for j in range(run.first, run.end, unroll=1):
                pages = work.pages(item, j)
                kv_free.wait()
                work.load_k(item, j, pages, kv.stage, barrier=kv.expect(work.k_bytes))
                kv.advance()
                kv_free.advance()
                if waiting:
                    for t in work.tiles:
                        q_free.wait(t)
                        work.load_q(item, t, barrier=q.expect(work.q_bytes, t))
                    q_free.advance()
                    waiting = False
                kv_free.wait()
                work.load_v(item, j, pages, kv.stage, barrier=kv.expect(work.v_bytes))
                kv.advance()
                kv_free.advance()
        index = source.next(index)
    q_free.drain(work.tiles)
    kv_free.drain()


@attrs.frozen
class Part:
    """What a CTA loads of a block of keys.

    Attributes:
        key, column: Where it begins.
        copies: That bring it, each with the rows behind those of the one before.
        shape: Rows and columns of a copy.
    """

    key: Any
    column: Any
    copies: int
    shape: tuple[int, int]


class LoadWork(Fixed):
    """TMA copies of one tile each.

    Attributes:
        operands: By "q", "k" and "v".
        page_table: (batch, pages) int32: the page of each stretch of a sequence's keys.
        parts: "k", "v" to what the CTA loads of a block: of those that share an MMA each has some
            rows of K and some columns of V.
    """

    def __init__(self, spec: Spec, operands: dict[str, Operand], page_table: cute.Tensor, cta: Any):
        self.spec, self.operands, self.page_table = spec, operands, page_table
        self.tiles = tuple(range(spec.tiles))
        self.q_bytes, self.k_bytes = spec.rows * spec.d * 2, spec.keys * spec.d * 2
        self.v_bytes = TILE * spec.columns * 2
        self.parts = {
            "k": Part(cta * spec.keys, 0, spec.keys // spec.k_rows, (spec.k_rows, spec.d)),
            "v": Part(0, cta * spec.columns, TILE // spec.key_rows, (spec.key_rows, spec.columns)),
        }

    @touches(lambda item, t, barrier: (writes("q", t),), unit="tma")
    def load_q(self, item: Any, t: Any, barrier: Any) -> None:
        first = item.start_q + (item.tile * self.spec.tiles + t) * self.spec.queries
        q = self.operands["q"]
        there = q.view[(None, None, None, item.h, item.b_q)]
        q.load(there, (0, first, 0), (*q_rows(self.spec), self.spec.d), (0, t), barrier)

    def pages(self, item: Any, j: Any) -> cutlass.Int32:
        """The pages of a block, one a thread of the warp, which `load_k` and `load_v` hand on.

        A part that begins behind the sequence's end has no page; it gets the first one, none of
        whose rows are then taken.
        """
        if not self.spec.page_rows:
            return cutlass.Int32(0)
        number = (j * TILE + cute.arch.lane_idx() * self.spec.key_rows) // self._page_size
        inside = number * self._page_size < item.seqlen_k
        return self.page_table[item.b, select(inside, number, 0, "int")]

    @touches(lambda item, j, pages, stage, barrier: (writes("kv", stage),), unit="tma")
    def load_k(self, item: Any, j: Any, pages: Any, stage: Any, barrier: Any) -> None:
        self._copy_keys("k", item, j, pages, stage, barrier)

    @touches(lambda item, j, pages, stage, barrier: (writes("kv", stage),), unit="tma")
    def load_v(self, item: Any, j: Any, pages: Any, stage: Any, barrier: Any) -> None:
        self._copy_keys("v", item, j, pages, stage, barrier)

    def _copy_keys(
        self, name: str, item: Any, j: Any, pages: Any, stage: Any, barrier: Any
    ) -> None:
        if self.spec.page_rows:
            _copy_pages(self, name, item, j, pages, stage, barrier)
        else:
            place = item.b_k, item.start_k, item.seqlen_k, j * TILE + self.parts[name].key
            self.copy_rows(name, item, place, (0, stage), barrier)

    @property
    def _page_size(self) -> Any:
        return self.operands["k"].view.shape[0]

    def page_place(self, item: Any, key: Any, page: Any) -> tuple:
        """Where a key is: a page is a batch entry with a length of its own."""
        first = key // self._page_size * self._page_size
        left = item.seqlen_k - first
        length = select(left < self._page_size, left, self._page_size, "int")
        return page, 0, select(length < 0, 0, length, "int"), key - first

    def copy_rows(self, name: str, item: Any, place: tuple, to: tuple, barrier: Any) -> None:
        """Rows `first`, ... of the `length` rows behind `start`, of a batch entry or a page."""
        operand, part = self.operands[name], self.parts[name]
        b, start, length, first = place
        there, row = operand.rows(b, item.h_kv, start, length, first)
        operand.load(there, (row, part.column), part.shape, to, barrier)


@cute.jit
def _copy_pages(
    work: Any, name: cutlass.Constexpr, item: Any, j: Any, pages: Any, stage: Any, barrier: Any
):  # fmt: skip
    part = work.parts[name]
    for copy in cutlass.range(part.copies, unroll=1):
        key = part.key + copy * part.shape[0]
        page = cute.arch.shuffle_sync(pages, key // work.spec.key_rows)
        place = work.page_place(item, j * TILE + key, page)
        work.copy_rows(name, item, place, (copy, stage), barrier)
