"""How operands lie in shared memory: panels that TMA fills and the tensor core reads both ways.

A panel is rows of 16, 32 or 64 columns one behind the other, swizzled over its whole width. An
operand is panels one behind the other; the tensor core takes its rows or its columns for M or N.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import cute

from fa4core.pipeline.layout import Placed


def panel(columns: int) -> int:
    """Columns of a panel: the widest swizzle that divides them."""
    return next(width for width in (64, 32, 16) if columns % width == 0)


def swizzle(columns: int, dtype: Any) -> cute.Swizzle:
    """Over a panel of 128, 64 or 32 bytes."""
    return cute.make_swizzle({128: 3, 64: 2, 32: 1}[panel(columns) * dtype.width // 8], 4, 3)


def box(rows: tuple[int, ...], columns: int, height: int) -> cute.Layout:
    """Rows of the panels, the first mode of `rows` fastest, and all their columns.

    Args:
        height: Rows of a panel, of which all or the first are in the box.
    """
    width = panel(columns)
    strides = [width]
    for n in rows[:-1]:
        strides.append(strides[-1] * n)
    shape = (*rows, (width, columns // width))
    return cute.make_layout(shape, stride=(*strides, (1, height * width)))


def swizzled(layout: cute.Layout, columns: int, dtype: Any) -> cute.ComposedLayout:
    return cute.make_composed_layout(swizzle(columns, dtype), 0, layout)


def boxes(
    begin: cute.Pointer,
    placed: Placed,
    rows: tuple[int, ...],
    columns: int,
    height: int,
    dtype: Any,
) -> cute.Tensor:
    """A region's tiles as TMA fills them; the last modes are the copy and the stage.

    Args:
        begin: Of shared memory.
        placed: Where the region lies in it.
        rows, columns, height: As of `box`; a tile is as many boxes as its panels are high.
        dtype: Of the elements.
    """
    count = math.prod(rows)
    copies = cute.make_layout(height // count, stride=count * panel(columns))
    stages = cute.make_layout(placed.region.stages, stride=placed.stride * 8 // dtype.width)
    layout = cute.append(cute.append(box(rows, columns, height), copies), stages)
    pointer = cute.recast_ptr(begin + placed.offset, swizzle(columns, dtype), dtype=dtype)
    return cute.make_tensor(pointer, layout)


def clear_rows(
    begin: cute.Pointer, placed: Placed, first: int, columns: int, height: int, thread: Any,
    threads: int,
) -> None:  # fmt: skip
    """Zeros in the rows from `first` on of a region's 16-bit panels, by all threads of the CTA."""
    width = panel(columns)
    words = (height - first) * width // 2
    if not words:
        return
    for stage in range(placed.region.stages):
        for left in range(0, columns, width):
            behind = stage * placed.stride + (left * height + first * width) * 2
            pointer = cute.recast_ptr(begin + placed.offset + behind, dtype=cutlass.Int32)
            _clear(pointer, words, thread, threads)
    cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def _clear(words: cute.Pointer, count: cutlass.Constexpr, thread: Any, threads: cutlass.Constexpr):
    to = cute.make_tensor(words, cute.make_layout(count))
    for i in range(thread, count, threads):
        to[i] = 0
