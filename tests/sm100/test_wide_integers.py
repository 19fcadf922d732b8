"""Integers that need more than the kernels' 32 bits are refused, not cut off."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core import Problem, Variant, attention, supports
from fa4core.emulator.session import emulator
from primitives import mask, score, sink

PROBLEM = Problem(1, 1, 1, 64, 64, (8,), (8,), dtype=torch.bfloat16)


def answer(variant: Variant) -> object:
    return supports(variant, PROBLEM, backend="emulator")


def test_wide_constants_are_refused_wherever_they_are() -> None:
    numbers = torch.zeros(8, dtype=torch.int64)
    wide = (
        Variant(mask=mask.define(lambda b, h, q, k: numbers[k] > 2**33)),
        Variant(mask=mask.define(lambda b, h, q, k: numbers[k] * 2**32 > q)),
        Variant(score=score.define(lambda s, b, h, q, k: s + (numbers[k] - 2**40))),
        Variant(sink=sink.define(lambda b, h, q: q * 2**31 * 1.0)),
    )
    for variant in wide:
        refused = answer(variant)
        assert not refused, variant
        assert "32 bits" in refused.reason


def test_what_32_bits_hold_is_taken() -> None:
    most = mask.define(lambda b, h, q, k: k * (2**31 - 1) >= -(2**31))
    assert answer(Variant(mask=most))
    assert answer(Variant(mask=mask.causal() & mask.random(0.5), score=score.softcap(1e12)))


def test_wide_values_of_a_captured_tensor_are_refused() -> None:
    numbers = torch.arange(8) + 2**33
    q = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16)
    variant = Variant(mask=mask.define(lambda b, h, q, k: numbers[k] > q))
    with pytest.raises(ValueError, match="32 bits"), emulator(target="sm100"):
        attention(q, q, q, variant, backend="emulator")
