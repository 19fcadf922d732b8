"""A thread's pieces of rows, in the kernels before and after the main one.

They work on query tiles of padded tensors (`rows`), one CTA for a tile of a head. They are limited
by memory: what they say of rows is read and written once, in pieces of 16 bytes.
"""

from __future__ import annotations

from typing import Any

from cutlass import cute

THREADS = 128
PIECE = 8  # columns of a thread: 16 bytes of an input


class Tile:
    """A query tile of a head.

    Attributes:
        number: Among all tiles.
        h: The head.
        b: Index into the batch mode of the queries.
        first: Its first row there.
        count: Rows that are the sequence's.
        thread: Of the CTA.
    """

    def __init__(self, table: cute.Tensor):
        self.thread, _, _ = cute.arch.thread_idx()
        self.number, self.h, _ = cute.arch.block_idx()
        self.b, self.first, self.count = (table[self.number, i] for i in range(3))


def piece(rows: cute.Tensor, place: tuple, column: Any, size: int = PIECE) -> cute.Tensor:
    """`size` columns of a row of (..., columns), from piece `column` on."""
    return cute.local_tile(rows[(*place, None)], (size,), (column,))


def loaded(values: cute.Tensor) -> cute.Tensor:
    """In registers."""
    copy = cute.make_rmem_tensor(cute.make_layout(cute.size(values)), values.element_type)
    cute.autovec_copy(values, copy)
    return copy


def aligned(tensor: cute.Tensor) -> cute.Tensor:
    """A tensor of rows that all begin at multiples of 16 bytes."""
    step = 128 // tensor.element_type.width
    *outer, last = tensor.stride
    strides = (*(cute.assume(s, divby=step) for s in outer), last)
    return cute.make_tensor(tensor.iterator, cute.make_layout(tensor.shape, stride=strides))


def passes(pieces: int) -> int:
    """Passes in which all threads work on one piece each."""
    return -(-pieces // THREADS)
