"""Runs a case of the testing kit in the emulator and compares it with the oracle."""

from __future__ import annotations

from torch import Tensor

from fa4core.emulator.session import emulator
from fa4core.testing import (
    Case,
    LayoutSpec,
    Shape,
    assert_close_to_oracle,
    by_backend,
    default_exp,
    run,
)

FIXED = LayoutSpec()


def execute(
    variant: str, shape: Shape, layout: LayoutSpec = FIXED, *, dtype: str = "bfloat16",
    seed: int = 0, num_sms: int = 2, scale: float | None = None, backward: bool = False,
    deterministic: bool = False, **rest,
) -> dict[str, Tensor]:  # fmt: skip
    """Output, LSE and row maximum, and all gradients if asked for, with every detector on."""
    case = Case(variant, shape, layout, dtype=dtype, seed=seed, **rest)
    inputs = case.inputs()
    with emulator(target="sm100", seed=seed, detect="all", num_sms=num_sms, record=False):
        attend = by_backend("emulator", **({"deterministic": True} if deterministic else {}))
        results = run(attend, inputs, scale=scale, backward=backward)
        exp = default_exp("emulator", inputs)
    assert_close_to_oracle(results, inputs, scale=scale, context=str(case), exp=exp)
    return results
