"""The SM100 backward kernels, executed by the emulator, against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from emulated import FIXED, execute

from fa4core import Variant, attention
from fa4core.emulator.session import emulator
from fa4core.testing import LayoutSpec, Shape

VARLEN = LayoutSpec("varlen")


def gradients(variant: str, shape: Shape, layout: LayoutSpec = FIXED, **rest) -> dict:
    return execute(variant, shape, layout, backward=True, **rest)


@pytest.mark.parametrize("dims", [(128, 128), (96, 64), (8, 40)], ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    """dQ over dP, in four parts; in three parts; apart from dP."""
    gradients("Variant()", Shape((200,), (300,), 2, 1, *dims), dtype="float16")


def test_masks_and_groups_of_heads_over_sequences_of_any_length() -> None:
    shape = Shape((200, 7, 0, 129), (130, 300, 5, 0), 4, 2, 64, 64)
    gradients("Variant(mask=mask.causal())", shape, VARLEN, num_sms=3, seed=1)


def test_rows_and_keys_with_nothing_to_attend_to() -> None:
    """Key tiles that no query visits get zeros."""
    gradients("Variant(mask=mask.sliding_window(40, 0))", Shape((100,), (400,), 1, 1, 64, 64))
    gradients("Variant(mask=mask.causal())", Shape((300,), (100,), 1, 1, 64, 64))


def test_score_mods_have_derivatives_and_captured_tensors_gradients() -> None:
    alibi = "score.alibi(normal(0, 2)) >> score.softcap(20.0)"
    shape = Shape((150,), (150,), 2, 1, 128, 128)
    found = gradients(f"Variant(mask=mask.causal(), score={alibi})", shape)
    assert found["d0"].abs().max() > 0


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_any_scale(scale: float) -> None:
    gradients("Variant()", Shape((130,), (130,), 1, 1, 64, 64), scale=scale)


def test_deterministic_gradients_are_the_same_bit_by_bit() -> None:
    """Under other schedules of the machine, and on other numbers of SMs."""
    shape = Shape((200,), (600,), 2, 1, 64, 64)
    torch.manual_seed(0)
    make = [torch.randn(1, n, h, 64).bfloat16() for n, h in ((200, 2), (600, 1), (600, 1))]
    found = []
    for seed, sms in ((0, 1), (1, 3), (2, 8)):
        leaves = [t.clone().requires_grad_() for t in make]
        with emulator(target="sm100", seed=seed, num_sms=sms, record=False):
            out = attention(*leaves, Variant(), backend="emulator", deterministic=True)
            found.append(torch.autograd.grad(out.float().square().sum(), leaves))
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )
    gradients("Variant(mask=mask.causal())", shape, deterministic=True, num_sms=3)


def test_large_head_dims_are_refused_with_the_reason() -> None:
    q, k, v = (torch.randn(1, 20, 1, 192).bfloat16().requires_grad_() for _ in "qkv")
    with pytest.raises(NotImplementedError, match="head dim 192"):
        attention(q, k, v, backend="emulator").sum().backward()
