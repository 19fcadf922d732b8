"""How TMA sees tensors: views of global memory, and boxes of shared memory that it fills.

All operands lie in shared memory as panels: 128 rows of 16, 32 or 64 columns, one behind the other,
swizzled over the whole width of a panel (a CTA of a pair has panels of 64 rows of K); the tensor
core reads Q and K, and V transposed, out of them. `kernel` makes copy atoms from a view and a box;
`load` names tiles of the views.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute

from fa4core.sm100.forward.spec import TILE, Spec


def panel(columns: int) -> int:
    """Columns of a panel: the widest swizzle that divides them."""
    return next(width for width in (64, 32, 16) if columns % width == 0)


def swizzle(columns: int, dtype: Any) -> cute.Swizzle:
    """Over a panel of 128, 64 or 32 bytes."""
    return cute.make_swizzle({128: 3, 64: 2, 32: 1}[panel(columns) * dtype.width // 8], 4, 3)


def box(rows: tuple[int, ...], columns: int, height: int = TILE) -> cute.Layout:
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


def q_rows(spec: Spec) -> tuple[int, int]:
    """The rows of a query tile: heads, which are fastest, and queries."""
    return spec.packed, spec.queries


def queries(q: cute.Tensor, spec: Spec) -> cute.Tensor:
    """(batch, rows, heads, d) as (packed heads, rows, d, groups of heads, batch).

    A tile may reach behind a sequence's end: its rows there are computed, and never stored.
    """
    batch, rows, heads, d = q.shape
    of_batch, of_row, of_head, _ = q.stride
    shape = (spec.packed, rows, d, heads // spec.packed, batch)
    stride = (of_head, of_row, 1, of_head * spec.packed, of_batch)
    return cute.make_tensor(q.iterator, cute.make_layout(shape, stride=stride))


def results(out: cute.Tensor, spec: Spec) -> cute.Tensor:
    """(batch, rows, heads, d), contiguous, as (packed heads, rows, d, groups of heads, shift).

    Rows and shift as in `forward.views.keys`, over all rows of all batch entries: TMA takes five
    modes at most.
    """
    batch, rows, heads, d = out.shape
    _, of_row, of_head, _ = out.stride
    total = batch * rows
    back = cute.assume(cutlass.Int64(total) * cutlass.Int64(of_row), divby=8)
    shape = (spec.packed, total, d, heads // spec.packed, total + 1)
    stride = (of_head, of_row, 1, of_head * spec.packed, of_row)
    return cute.make_tensor(out.iterator - back, cute.make_layout(shape, stride=stride))
