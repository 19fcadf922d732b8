"""In the emulator of a B300 calls are planned and compiled for it, not for a B200."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import torch

from fa4core import Variant, attention
from fa4core.emulator.session import emulator
from primitives import mask


@pytest.mark.parametrize(("target", "arch"), [("sm100", "sm_100a"), ("sm103", "sm_103a")])
def test_the_emulated_gpu_is_the_one_that_is_planned_for(target, arch) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 200, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    causal = Variant(mask=mask.causal())
    with emulator(target, num_sms=2, record=False) as session:
        out = attention(q, k, v, causal, backend="emulator")
    assert f".target {arch}" in session.launches[-1].ptx
    # a B300 has exponentials enough, so none is emulated on its FMA units
    emulated = "cvt.rmi" in session.launches[-1].ptx or "add.rm" in session.launches[-1].ptx
    assert emulated == (target == "sm100")
    expected = attention(q, k, v, causal, backend="reference")
    assert (out - expected).abs().max() < 2e-2
