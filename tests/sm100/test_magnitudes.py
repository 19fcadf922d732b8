"""Scores so large that float32 is coarser than a weight's exponent, and results of any size."""

from __future__ import annotations

import math

import pytest
import torch
from sampled import one_of

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from emulated import execute

from fa4core import Variant, attention
from fa4core.emulator.session import emulator
from fa4core.sm100.forward.spec import Spec
from fa4core.testing import Shape, oracle
from primitives import score


def compared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, variant: Variant) -> None:
    """With fixed limits: the testing kit's grow with the scores, beyond what is of use here."""
    with emulator(target="sm100", detect="all", record=False):
        found = attention(
            q, k, v, variant, backend="emulator", return_lse=True, return_row_max=True
        )
    expected = oracle(q, k, v, variant)
    for given, right, rtol in zip(found, expected, (2e-2, 1e-5, 1e-5), strict=True):
        torch.testing.assert_close(given.double(), right, rtol=rtol, atol=2e-2)


def constant(value: float, d: int, dtype: torch.dtype, sign: float = 1.0) -> None:
    """All scores are one number, so every key has the same weight."""
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(1, 300, 1, 64, generator=generator).to(dtype)
    q, k = (torch.full((1, n, 1, d), value, dtype=dtype) for n in (130, 300))
    compared(q, sign * k, v, Variant())


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_inputs_of_any_magnitude(sign: float) -> None:
    for value in (1e2, 1e3, 1e4, 1e5, 1e7, 1e17):
        constant(value, 64, torch.bfloat16, sign)
    for value in (30.0, 1e3, 5e3, 1e4, 3e4, 6e4):
        constant(value, 256, torch.float16, sign)


@pytest.mark.parametrize("value", [-3.4e38, -1e30, -1e9, 1e9, 1e20, 3.4e38])
def test_rows_whose_scores_are_all_one_huge_number(value: float) -> None:
    """What a function that masks with a huge negative number does to a row without any key."""
    bias = torch.where(torch.arange(150) % 3 == 0, value, 0.0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 150, 1, 64, generator=generator).bfloat16() for _ in range(3))
    compared(q, k, v, Variant(score=score.define(lambda s, b, h, i, j: s * 0 + bias[i])))


def test_the_largest_of_scores_far_apart_has_all_the_weight() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 140, 1, 64, generator=generator) for _ in range(3))
    compared(q.half() * 1e4, k.half() * 1e4, v.half(), Variant())
    compared(q.bfloat16() * 3e5, k.bfloat16() * 3e5, v.bfloat16(), Variant())


@pytest.mark.parametrize("threshold", one_of(2, [15.0, 0.0]))
def test_thresholds_leave_room_in_the_inputs_type(threshold: float) -> None:
    variant = f"Variant(rescale_threshold={threshold}, score=score.define(lambda s, b, h, q, k: s"
    for slope in (0.05, 2.0**17):
        execute(f"{variant} + k * {slope}))", Shape((130,), (300,), 1, 1, 64, 64), dtype="float16")


def test_the_room_for_rounding() -> None:
    for dtype, threshold in (
        ("float16", 0.0),
        ("float16", 8.0),
        ("float16", 15.0),
        ("bfloat16", 64.0),
    ):
        spec = Spec("", dtype, 64, 64, threshold=threshold)
        largest = math.log2(torch.finfo(getattr(torch, dtype)).max)
        assert threshold + spec.far / 2**25 < largest
        assert spec.far >= 2.0**24


@pytest.mark.parametrize("slope", [1e7, 1e9, -1e9, 1e30])
def test_slopes_so_steep_that_one_key_has_all_the_weight(slope: float) -> None:
    slopes = torch.tensor([slope])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 64, generator=generator).bfloat16() for n in (130, 256, 256))
    compared(q, k, v, Variant(score=score.define(lambda s, b, h, i, j: s + slopes[h] * (j - i))))


@pytest.mark.parametrize("value", [-3.4e38, -math.inf, 0.0])
def test_rows_with_a_huge_bias(value: float) -> None:
    """What it does to a row without any key that a function says so of the row alone."""
    bias = torch.where(torch.arange(130) % 3 == 0, value, 0.0)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 1, 64, generator=generator).bfloat16() for n in (130, 256, 256))
    compared(q, k, v, Variant(score=score.define(lambda s, b, h, i, j: s + bias[i])))


@pytest.mark.parametrize("scale", one_of(2, [1e-38, 1e-15]))
def test_a_bias_with_a_tiny_scale(scale: float) -> None:
    execute("Variant(score=score.alibi(1))", Shape((128,), (256,), 1, 1, 64, 64), scale=scale)
