"""Deterministic gradients: the same bit by bit whatever order the hardware works in, and right."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from emulated_backward import FIXED, TARGETS, execute, gradients

from fa4core.emulator.session import emulator
from fa4core.testing import Case, LayoutSpec, Shape

#: More key tiles than CTAs at once, GQA, tiles that only some key tiles visit, ragged lengths.
CASES = {
    "causal": ("Variant(mask=mask.causal())", Shape((500,), (500,), 2, 1), FIXED),
    "full": ("Variant()", Shape((200,), (600,), 1, 1), FIXED),
    "blocks": (
        "Variant(blocks=sparsity.BlockMap(bits(2, 1, 4, 6, 6), bits(3, 1, 1, 6, 6), block_q=64, block_k=96))",
        Shape((384,), (560,), 4, 2),
        FIXED,
    ),
    "packed": (
        "Variant(mask=mask.causal(), score=score.alibi(normal(1, 2)) >> score.softcap(5.0))",
        Shape((130, 0, 260), (300, 100, 261), 2, 2),
        LayoutSpec("varlen"),
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_every_order_of_events_gives_the_same_bits(name: str, target: str) -> None:
    """Seeds of the emulator are orders in which warps run and asynchronous work takes effect."""
    first = execute(target, *CASES[name], seed=0, num_sms=3, deterministic=True)
    inputs = Case(*CASES[name], seed=0).inputs()
    for seed in (1, 2, 3):
        with emulator(target, seed, num_sms=3, record=False):
            other = gradients(inputs, deterministic=True)
        assert all(torch.equal(other[n], found) for n, found in first.items())
    with emulator(target, seed, num_sms=1, record=False):  # captured ones are summed by CTAs
        other = gradients(inputs, deterministic=True)
    assert all(torch.equal(other[n], first[n]) for n in ("dq", "dk", "dv"))


@pytest.mark.parametrize("target", TARGETS)
def test_free_order_differs_in_bits(target: str) -> None:
    """So the test above can fail."""
    inputs = Case(*CASES["full"], seed=0).inputs()
    found = []
    for seed in range(4):
        with emulator(target, seed, num_sms=4, record=False):
            found.append(gradients(inputs)["dq"])
    assert any(not torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "score",
    [
        "score.dense_bias(normal(1, 70, 70))",
        "score.define(lambda s, b, h, q, k, t=normal(1, 2, 3000): s + t[h, 0])",
    ],
)
def test_what_has_no_fixed_order_is_refused(score: str, target: str) -> None:
    """Indices of pairs, and what is too large for every warp to have one of its own."""
    inputs = Case(f"Variant(score={score})", Shape((70,), (70,), 2, 2)).inputs()
    with emulator(target), pytest.raises(NotImplementedError, match=r"deterministic=True"):
        gradients(inputs, deterministic=True)
