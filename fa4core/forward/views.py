"""How kernels see sequences, whatever lies behind them in memory."""

from __future__ import annotations

import cutlass
from cutlass import cute


def batched(tensor: cute.Tensor, rank: int) -> cute.Tensor:
    """A packed tensor as the only entry of a batch; one of this rank has a batch already."""
    if cute.rank(tensor) == rank:
        return tensor
    never_used = cute.assume(cutlass.Int64(8), divby=8)  # but TMA wants 16 bytes of it
    shape, stride = (cutlass.Int32(1), *tensor.shape), (never_used, *tensor.stride)
    return cute.make_tensor(tensor.iterator, cute.make_layout(shape, stride=stride))


def keys(tensor: cute.Tensor) -> cute.Tensor:
    """(batch, rows, heads, d) as (rows, d, heads, batch, shift).

    Rows and shift have one stride, and the pointer is moved back by all rows: coordinates
    `rows - length + i` and `start + length` name row `start + i` of the tensor, and leave the box
    exactly where a sequence of `length` rows ends, whatever follows it in memory. In a pool of
    pages each page is a batch entry, and `length` the number of its rows that are in use.
    """
    batch, rows, heads, d = tensor.shape
    of_batch, of_row, of_head, _ = tensor.stride
    back = cute.assume(cutlass.Int64(rows) * cutlass.Int64(of_row), divby=8)
    shape = (rows, d, heads, batch, 2 * rows + 1)
    stride = (of_row, 1, of_head, of_batch, of_row)
    return cute.make_tensor(tensor.iterator - back, cute.make_layout(shape, stride=stride))


def by_rows(out: cute.Tensor) -> cute.Tensor:
    """(batch, rows, heads, d) as (rows, d, heads, batch), every row at a multiple of 16 bytes."""
    order = (1, 3, 2, 0)
    shape = tuple(out.shape[i] for i in order)
    stride = tuple(1 if i == 3 else cute.assume(out.stride[i], divby=8) for i in order)
    return cute.make_tensor(out.iterator, cute.make_layout(shape, stride=stride))


def queries(q: cute.Tensor, packed: int) -> cute.Tensor:
    """(batch, rows, heads, d) as (packed heads, rows, d, groups of heads, batch).

    A tile may reach behind a sequence's end: its rows there are computed, and never stored.
    """
    batch, rows, heads, d = q.shape
    of_batch, of_row, of_head, _ = q.stride
    shape = (packed, rows, d, heads // packed, batch)
    stride = (of_head, of_row, 1, of_head * packed, of_batch)
    return cute.make_tensor(q.iterator, cute.make_layout(shape, stride=stride))


def results(out: cute.Tensor, packed: int) -> cute.Tensor:
    """(batch, rows, heads, d), contiguous, as (packed heads, rows, d, groups of heads, shift).

    Rows and shift as in `keys`, over all rows of all batch entries: TMA takes five
    modes at most.
    """
    batch, rows, heads, d = out.shape
    _, of_row, of_head, _ = out.stride
    total = batch * rows
    back = cute.assume(cutlass.Int64(total) * cutlass.Int64(of_row), divby=8)
    shape = (packed, total, d, heads // packed, total + 1)
    stride = (of_head, of_row, 1, of_head * packed, of_row)
    return cute.make_tensor(out.iterator - back, cute.make_layout(shape, stride=stride))
