"""Blocks of keys, K's and V's, as load roles bring them: out of a sequence, or out of its pages.

K and V end exactly where their sequence does, whatever follows it in memory (`views.keys`): TMA
fills the rest with zeros, because P is 0 there and 0 * NaN is not.
"""

from __future__ import annotations

from typing import Any

import attrs
import cutlass
from cutlass import cute

from fa4core.forward.spec import ForwardSpec
from fa4core.forward.tma import Operand
from fa4core.forward.work import key_tile
from fa4core.lowering.cute import inside, select
from fa4core.pipeline.effects import Fixed


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


class KeyBlocks(Fixed):
    """Brings blocks of keys.

    Attributes:
        operands, parts: By "k" and "v".
        pages: A page table (batch, pages) int32, the page of each stretch of a sequence's keys; or
            none at all.
    """

    def __init__(
        self,
        spec: ForwardSpec,
        operands: dict[str, Operand],
        parts: dict[str, Part],
        pages: tuple[cute.Tensor, ...],
    ):
        self.spec, self.operands, self.parts, self.tables = spec, operands, parts, pages

    def pages(self, item: Any, j: Any) -> cutlass.Int32:
        """The pages of block `j`, one a thread of the warp, which `load` hands on."""
        if not self.spec.page_rows:
            return cutlass.Int32(0)
        (table,) = self.tables
        key = key_tile(j) * self.spec.block + cute.arch.lane_idx() * self.spec.key_rows
        return table[item.b, inside(key, item.seqlen_k) // self._page_size]

    def load(self, name: str, item: Any, j: Any, pages: Any, stage: Any, barrier: Any) -> None:
        """Bring K or V of block `j` to a stage."""
        if self.spec.page_rows:
            _load_pages(self, name, item, j, pages, stage, barrier)
        else:
            first = key_tile(j) * self.spec.block + self.parts[name].key
            place = item.b_k, item.start_k, item.seqlen_k, first
            self.copy(name, item, place, (0, stage), barrier)

    @property
    def _page_size(self) -> Any:
        return self.operands["k"].view.shape[0]

    def page_place(self, item: Any, key: Any, page: Any) -> tuple:
        """Where a key is: a page is a batch entry with a length of its own.

        A copy that begins behind the sequence's end brings its last key instead, which is in the
        block anyway: on an H200, a box that lies outside its tensor altogether ends in an illegal
        address where memory before the tensor is unmapped.
        """
        key = inside(key, item.seqlen_k)
        first = key // self._page_size * self._page_size
        left = item.seqlen_k - first
        return page, 0, select(left < self._page_size, left, self._page_size, "int"), key - first

    def copy(self, name: str, item: Any, place: tuple, to: tuple, barrier: Any) -> None:
        """Rows `first`, ... of the `length` rows behind `start`, of a batch entry or a page."""
        operand, part = self.operands[name], self.parts[name]
        b, start, length, first = place
        there, row = operand.rows(b, item.h_kv, start, length, first)
        operand.load(there, (row, part.column), part.shape, to, barrier)


@cute.jit
def _load_pages(
    work: Any, name: cutlass.Constexpr, item: Any, j: Any, pages: Any, stage: Any, barrier: Any
):  # fmt: skip
    part = work.parts[name]
    for copy in cutlass.range(part.copies, unroll=1):
        key = part.key + copy * part.shape[0]
        page = cute.arch.shuffle_sync(pages, key // work.spec.key_rows)
        first = key_tile(j) * work.spec.block
        place = work.page_place(item, first + key, page)
        work.copy(name, item, place, (copy, stage), barrier)
