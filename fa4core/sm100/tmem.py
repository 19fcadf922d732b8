"""Columns of tensor memory to and from the registers of a warpgroup: a lane for each thread."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

LANES = 128  # of tensor memory: rows of an accumulator, and of most operands


def columns(address: cute.Pointer, count: int) -> cute.Tensor:
    """`count` columns as a (128, count) tensor."""
    return cute.make_tensor(address, cute.make_layout((LANES, count), stride=(1 << 16, 1)))


def load(place: cute.Tensor, to: cute.Tensor, thread: Any) -> None:
    """Columns -> the registers of `thread` of the warpgroup; a fence is up to the caller."""
    width = place.shape[1]
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(width)), cutlass.Float32)
    mine = tcgen05.make_tmem_copy(atom, place).get_slice(thread)
    shape = mine.partition_D(cute.make_identity_tensor((LANES, width))).layout.shape
    cute.copy(atom, mine.partition_S(place), cute.make_tensor(to.iterator, cute.make_layout(shape)))


def store(of: cute.Tensor, place: cute.Tensor, thread: Any) -> None:
    """The registers of `thread` of the warpgroup -> columns; a fence is up to the caller."""
    width = place.shape[1]
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(width)), cutlass.Float32)
    mine = tcgen05.make_tmem_copy(atom, place).get_slice(thread)
    shape = mine.partition_S(cute.make_identity_tensor((LANES, width))).layout.shape
    of = cute.make_tensor(of.iterator, cute.make_layout(shape))
    cute.copy(atom, of, mine.partition_D(place))
