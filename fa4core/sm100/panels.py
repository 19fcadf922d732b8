"""How operands lie in shared memory: panels that TMA fills and the tensor core reads both ways.

A panel is rows of 16, 32 or 64 columns one behind the other, swizzled over its whole width. An
operand is panels one behind the other; the tensor core takes its rows or its columns for M or N.
"""

from __future__ import annotations

from typing import Any

from cutlass import cute

LANES = 128  # of tensor memory: rows of an accumulator, and of most operands


def panel(columns: int) -> int:
    """Columns of a panel: the widest swizzle that divides them."""
    return next(width for width in (64, 32, 16) if columns % width == 0)


def swizzle(columns: int, dtype: Any) -> cute.Swizzle:
    """Over a panel of 128, 64 or 32 bytes."""
    return cute.make_swizzle({128: 3, 64: 2, 32: 1}[panel(columns) * dtype.width // 8], 4, 3)


def box(rows: tuple[int, ...], columns: int, height: int = LANES) -> cute.Layout:
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
