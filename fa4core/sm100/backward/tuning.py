"""How a Blackwell backward kernel is cut, by its head dims: data, and what it costs.

Up to head dim 128 a block is 128 queries, and dQ has a lane of tensor memory for each of them.
Beyond that dK and dV leave columns for 64 queries only. An accumulator of 64 rows would fill half
of its lanes, so dQ is computed transposed, dQ^T = K^T dS^T: a lane for each of 128 columns of the
head dim, and as many such groups as cover it. Where dK and dV don't fit side by side, one launch
computes dV and another one dK and dQ. Both compute S: 6 products instead of 5.

Cycles of a block and a tile of 128 keys by the formulas of FlashAttention-4 (section 3.2: every
product reads its operands in shared memory, dS is written, dQ is staged and read), scaled to the
10 * 128^3 operations that a block has at head dim 128:

| head dims | launch | MMA | shared memory |
|---|---|---|---|
| 128, 128 | all | 2560 | 3328 |
| 128, 256 | all | 2560 | 3657 |
| 192, 128 | all | 2757 | 4529 |
| 256, 256 | dV | 1024 | 1024 |
| 256, 256 | dK, dQ | 2048 | 3712 |
"""

from __future__ import annotations

from typing import Literal

import attrs

NARROW = 128  # head dims up to here
LANES = 128  # of tensor memory
WARP = 32

Launch = Literal["all", "dv", "dk"]  # the gradients that a launch computes; dQ goes with dK


@attrs.frozen
class Stages:
    """Lengths of rings in shared memory.

    Attributes:
        q: Tiles of Q: with two, one CTA computes S of the next block before dK of this one.
        added: Parts of dQ that are staged.
        staged: Parts of dV and dK that are staged: one for each copy of the compute role, or one
            for the first copy, which then does that alone.
    """

    q: int = 2
    added: int = 2
    staged: int = 2


#: By the CTAs of a work tile; the first that fits is taken. Of one CTA, the last but one serves
#: (256, 176) to (256, 208), the last one (256, 224) to (256, 256).
STAGES = {
    1: (Stages(), Stages(staged=1), Stages(added=1, staged=1), Stages(1, 2, 1), Stages(1, 1, 1)),
    2: (Stages(q=1), Stages(q=1, added=1)),
}


@attrs.frozen
class Share:
    """A part of a block's dQ that a warp stages and adds at once.

    Attributes:
        columns: Of the head dim.
        row, column: Where that of the role's first warp begins.
        first_warp: Warps before this one have nothing to add: another share has it.
    """

    columns: int
    row: int
    column: int
    first_warp: int = 0


def groups(d: int) -> tuple[int, ...]:
    """Where groups of 128 columns begin that cover a head dim; the last ones may overlap."""
    return tuple(min(first, d - LANES) for first in range(0, d, LANES))


def transposed(d: int, queries: int) -> tuple[Share, ...]:
    """Shares of a transposed dQ: 32 queries, 32 columns for each warp."""
    return tuple(
        Share(WARP, row, first, (n * LANES - first) // WARP)
        for n, first in enumerate(groups(d))
        for row in range(0, queries, WARP)
    )
