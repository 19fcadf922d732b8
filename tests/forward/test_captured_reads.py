"""What score mods read of captured tensors that are smaller than the problem."""

from __future__ import annotations

import pytest
import torch
from sampled import one_of

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core import Variant, attention
from fa4core.emulator.session import emulator
from primitives import mask, score

TARGETS = pytest.mark.parametrize("target", ["sm100", "sm90"])
N = 300


def qkv() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, N, 1, 16, generator=generator).bfloat16() for _ in range(3))


def reads(table: torch.Tensor, index) -> score.ScoreMod:
    return score.define(lambda s, b, h, q, k: s + table[index(q, k)])


@TARGETS
@pytest.mark.parametrize(
    ("index", "kept"),
    [
        (lambda q, k: k, mask.full()),
        (lambda q, k: k // 2, mask.full()),
        (lambda q, k: q - k, mask.causal()),
    ],
)
def test_too_small_is_an_error(target: str, index, kept) -> None:
    variant = Variant(mask=kept, score=reads(torch.zeros(140), index))
    with emulator(target), pytest.raises(IndexError, match=r"size 140; .* runs over"):
        attention(*qkv(), variant, backend="emulator")


@pytest.mark.parametrize("target", one_of(2, ["sm100", "sm90"]))
def test_what_is_attended_to_decides(target: str) -> None:
    table = torch.randn(140, generator=torch.Generator().manual_seed(1))
    near = mask.causal() & mask.sliding_window(139)
    variant = Variant(mask=near, score=reads(table, lambda q, k: q - k))
    with emulator(target):
        out = attention(*qkv(), variant, backend="emulator")
    wanted = attention(*qkv(), variant, backend="reference")
    torch.testing.assert_close(out, wanted, atol=2e-2, rtol=2e-2)


@TARGETS
def test_no_index_leaves_the_tensor(target: str) -> None:
    """One whose bounds are not known beforehand: the emulator would find the access."""
    variant = Variant(score=reads(torch.zeros(5), lambda q, k: (q * k) % 301))
    with emulator(target, detect="all"):
        attention(*qkv(), variant, backend="emulator")
