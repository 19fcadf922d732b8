"""How TMA sees tensors: views of global memory.

`kernel` makes copy atoms from a view and a box of shared memory (`panels.box`; a CTA of a pair has
panels of 64 rows of K); `load` names tiles of the views.
"""

from __future__ import annotations

import cutlass
from cutlass import cute

from fa4core.sm100.forward.spec import Spec


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
