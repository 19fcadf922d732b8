"""A NaN that counts is not hidden, whichever unit computes its exponential or its tanh."""

from __future__ import annotations

import pytest
import torch
from sampled import one_of

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core import Variant, attention
from fa4core.emulator.session import emulator
from fa4core.testing import Case, LayoutSpec, Shape, assert_close_to_oracle, by_backend, run
from primitives import exp, score


@pytest.mark.parametrize(
    "variant",
    one_of(2, [Variant(), Variant(exp=exp.polynomial(3)), Variant(score=score.softcap(20.0))]),
    ids=["default", "polynomial", "softcap"],
)
def test_nan_in_a_key_reaches_every_row(variant: Variant) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 20, 1, 16, dtype=torch.bfloat16) for _ in range(3))
    for key in (0, 7, 14, 15, 19):
        poisoned = k.clone()
        poisoned[0, key, 0, 3] = torch.nan
        with emulator(target="sm100", detect="all", record=False):
            out = attention(q, poisoned, v, variant, backend="emulator")
        assert not out.isfinite().any(-1).all(-1).any(), key


def test_weights_that_underflow_are_no_error() -> None:
    case = Case(
        "Variant(sink=sink.learned(normal(2, 16)))",
        Shape((65, 1, 1), (65, 1, 64), 16, 2, 24, 24),
        LayoutSpec("varlen"),
        dtype="bfloat16",
        contents="large",
        seed=3,
    )
    inputs = case.inputs()
    with emulator(target="sm100", detect="all", record=False):
        results = run(by_backend("emulator"), inputs, backward=False)
    assert_close_to_oracle(results, inputs, context=str(case))
