"""Scores so large that float32 is coarser than a weight's exponent, in the Hopper kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core import Variant, attention
from fa4core.emulator.session import emulator
from fa4core.testing import oracle
from primitives import mask, score


def compared(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant, rows: bool = True
) -> None:
    """With fixed limits: the testing kit's grow with the scores, beyond what is of use here.

    `rows`: LSE and row maximum, too.
    """
    with emulator(target="sm90", detect="all", record=False):
        found = attention(
            q, k, v, variant, backend="emulator", return_lse=True, return_row_max=True
        )
    limits = (2e-2, 1e-5, 1e-5) if rows else (2e-2,)
    for given, right, rtol in zip(found, oracle(q, k, v, variant), limits, strict=False):
        torch.testing.assert_close(given.double(), right, rtol=rtol, atol=2e-2)


@pytest.mark.parametrize("dtype, values", [("bfloat16", (1e2, 1e5, 1e17)), ("float16", (1e4, 6e4))])
def test_equal_scores_of_any_magnitude(dtype: str, values: tuple[float, ...]) -> None:
    kind = getattr(torch, dtype)
    v = torch.randn(1, 300, 1, 64, generator=torch.Generator().manual_seed(0)).to(kind)
    for value in values:
        q, k = (torch.full((1, n, 1, 64), value, dtype=kind) for n in (130, 300))
        compared(q, k, v, Variant())


def test_rows_of_huge_scores_beside_others() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 150, 1, 64, generator=generator).bfloat16() for _ in range(3))
    for value in (-3.4e38, -1e30, 1e20, 3.4e38):
        bias = torch.where(torch.arange(150) % 3 == 0, value, 0.0)
        compared(q, k, v, Variant(score=score.define(lambda s, b, h, i, j: s * 0 + bias[i])))  # noqa: B023


@pytest.mark.parametrize("slope", [1.0, 1e7])
def test_biases_that_grow_with_the_distance(slope: float) -> None:
    """Small ones go into the exponents' shift, large ones are added to scores."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 300, 1, 64, generator=generator).bfloat16() for _ in range(3))
    slopes = torch.tensor([slope])
    for sign in (1.0, -1.0):
        mod = score.define(lambda s, b, h, i, j: s + sign * slopes[h] * (i - j))  # noqa: B023
        compared(q, k, v, Variant(mask=mask.causal(), score=mod), rows=slope < 1000)


def test_the_largest_of_scores_far_apart_has_all_the_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 140, 1, 64, generator=generator).bfloat16() for _ in range(3))
    compared(q * 3e5, k * 3e5, v, Variant())


def test_factors_of_rows_that_are_zero_or_tiny() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 90, 2, 64, generator=generator).bfloat16() for _ in range(3))
    caps, tiny = torch.tensor([0.0, 3.0]), torch.tensor([0.0, 1e-25])
    capped = score.define(lambda s, b, h, i, j: caps[h] * torch.tanh(s / caps[h]))
    compared(q, k, v, Variant(score=capped))
    grown = score.define(lambda s, b, h, i, j: tiny[h].abs() * torch.exp(50 + s))
    compared(q, k, v, Variant(score=grown))
