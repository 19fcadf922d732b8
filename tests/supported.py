"""Cases of the testing kit as kernels take them."""

from __future__ import annotations

import attrs

from fa4core.testing import Case


def supported(case: Case) -> Case:
    """The case with what the kernel does not take replaced by what it takes."""
    shape, layout = case.shape, case.layout
    if any(d % 8 or d > 256 for d in (shape.head_dim, shape.head_dim_v)):
        shape = attrs.evolve(shape, head_dim=64, head_dim_v=32)
    if layout.page_size % 8:
        layout = attrs.evolve(layout, page_size=8 * layout.page_size)
    return attrs.evolve(
        case,
        shape=shape,
        layout=layout,
        dtype=("float16", "bfloat16")[case.seed % 2],
    )
