"""How far the kernels' pipelines stay behind their roofline: figures of the model and of a GPU.

`target` puts them into targets, `makespan` estimates times from them. Imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import attrs

_T = TypeVar("_T")
ANY_HEAD_DIM = 1 << 30


@attrs.frozen
class Cost:
    """How far a pipeline stays behind its roofline; see each target for where it comes from.

    Attributes:
        efficiency: Cycles of the bound per cycle taken, in the steady state.
        tile_cycles: Cycles of a work tile besides its blocks (prologue and epilogue).
        setup_cycles: Part of `tile_cycles` that a persistent CTA pays once, not for every tile.
    """

    efficiency: float
    tile_cycles: float
    setup_cycles: float


def up_to(head_dim: int, entries: Sequence[tuple[int, _T]]) -> _T:
    """What the first entry says whose greatest head dim is not exceeded."""
    return next(found for most, found in entries if head_dim <= most)


# Forward on Blackwell, by greatest head dim: the timing model's cycles of our causal kernel, as
# `python benchmarks/pipeline_costs.py` prints them: the bound of a key block / its cycles, those of
# a work tile besides, and what of them a CTA pays once.
B200_FORWARD = (
    (64, Cost(1536 / 2166, 7965, 4027)),
    (128, Cost(2048 / 2371, 9066, 4984)),
    (192, Cost(2560 / 4260, 6782, 3752)),
    (ANY_HEAD_DIM, Cost(2048 / 4266, 7002, 5332)),
)
B300_FORWARD = (
    (64, Cost(1024 / 1832, 7684, 3813)),
    (128, Cost(2048 / 2248, 8765, 4888)),
    (192, Cost(2560 / 4269, 6427, 3343)),
    (ANY_HEAD_DIM, Cost(2048 / 4240, 6715, 4387)),
)

# Backward on Blackwell, by CTAs that share an MMA: the same model's cycles of FlashAttention-4's
# kernels, head dim 128, causal. Not known, and assumed: what a work tile costs besides its blocks,
# and that a persistent CTA saves a fifth of it.
BLACKWELL_BACKWARD = {
    1: Cost(3328 / 4367, 7438, 1500),
    2: Cost(2560 / 3914, 7438, 1500),
}

# Hopper: efficiency and cycles of a work tile are fitted to FlashAttention-4 measured on one H200
# (d = 128; causal, full, window 1,024; 1k to 32k): the model is then within 4 % of all 14 forward
# figures and within 14 % of the backward ones. The persistent share is assumed as above.
HOPPER_FORWARD = ((ANY_HEAD_DIM, Cost(0.70, 6500, 1500)),)
HOPPER_BACKWARD = {1: Cost(0.60, 11_500, 1500)}
