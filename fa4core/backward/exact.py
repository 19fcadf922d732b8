"""Sums of float32 numbers that don't depend on the order of additions, because they are exact.

A float32 number is an integer of 24 bits times a power of two. Powers are sorted into bins of eight
neighbours, and each bin holds an int64, to which kernels add the integer shifted within its bin, in
whatever order. Integers that no order can make overflow: a bin takes 2^32 additions. (The bins are
those of reproducible summation, Demmel and Nguyen, 2015, wide enough for all there is.) Costs
`BINS` words for each element, and time for nothing but atomic additions of 64 bits instead of 32.

Deterministic backward kernels add to captured tensors' gradients so (`mods`); `prepared` reads the
sums. It imports no DSL.
"""

from __future__ import annotations

import torch

NEIGHBOURS = 8  # powers of two of a bin
POWERS = 256 // NEIGHBOURS  # bins for numbers
BINS = POWERS + 1  # and one that counts what is no number

_LOWEST = -150  # a float32 with bits e of exponent, at least 1, is its integer times 2^(e - 150)


def totals(bins: torch.Tensor) -> torch.Tensor:
    """What bins (..., BINS) sum up to, float32 (...); NaN where an infinity or a NaN was added."""
    powers = torch.arange(POWERS, device=bins.device, dtype=torch.float64) * NEIGHBOURS + _LOWEST
    total = (bins[..., :POWERS].double() * torch.exp2(powers)).sum(-1)
    return torch.where(bins[..., POWERS] != 0, torch.nan, total).float()
