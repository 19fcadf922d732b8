"""Derivatives of mods as kernels compute them, against torch's autograd on the same functions."""

from __future__ import annotations

import math

import pytest
import torch
from sampled import one_of

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core.backward.exact import BINS, POWERS, totals
from fa4core.backward.rule import Rule
from fa4core.compile import import_dsl
from fa4core.compile.cache import obtain
from fa4core.compile.kernel import Kernel, type_of
from fa4core.emulator.session import emulator
from fa4core.forward.arguments import captured
from fa4core.lowering.torch import evaluate
from fa4core.places import in_emulator
from fa4core.variant import Variant
from primitives import mask, score

import_dsl()

import mods_kernel  # noqa: E402
from mods_kernel import KEYS, QUERIES, Spec  # noqa: E402

SCALE, B, H, FIRST_QUERY, FIRST_KEY = 0.5, 1, 2, 64, 128
#: Lengths that end outside the tile, and inside it, where the mask does not.
INSIDE, CUT = (200, 300), (110, 230)


def learned(*shape: int) -> torch.Tensor:
    return torch.randn(shape).requires_grad_()


def bias(*names: str):
    """A table that is indexed by these variables."""
    table = learned(*({"b": 2, "h": 4, "q": 200, "k": 300}[n] for n in names))

    def mod(s, b, h, q_idx, kv_idx):
        at = {"b": b, "h": h, "q": q_idx, "k": kv_idx}
        return s + table[tuple(at[n] for n in names)]

    return score.define(mod)


def distance():
    table = learned(64)
    return score.define(lambda s, b, h, q, k: s * table[(q - k).abs() // 8])


def scalar():
    factor = learned()
    return score.define(lambda s, b, h, q, k: s * factor + factor)


def parted():
    """NaN where the mask is false, and so are its derivatives."""
    table = learned(4)
    return score.define(
        lambda s, b, h, q, k: s + torch.sqrt((q + 131 - k).float() * table[h] ** 2) * 0.1
    )


SCORES = {
    "none": score.identity,
    "softcap": lambda: score.softcap(3.0),
    "ALiBi": lambda: score.alibi(learned(4)),
    "scalar": scalar,
    "bias of keys": lambda: bias("h", "k"),
    "bias of queries": lambda: bias("b", "q"),
    "bias of pairs": lambda: bias("h", "q", "k"),
    "distance": distance,
    "two, one of them twice": lambda: bias("h", "k") >> score.softcap(4.0) >> bias("h"),
    "parted": parted,
}


#: By default every second one, which is one of each score, in FULL and in PARTIAL tiles by turns.
CASES = [(name, (i + j) % 2 == 1) for i, name in enumerate(SCORES) for j in range(2)]
CASES.remove(("parted", False))  # the last


@pytest.mark.parametrize(("name", "partial"), one_of(2, CASES))
def test_values_gradients_and_shares_of_captured_tensors(name: str, partial: bool) -> None:
    check(name, partial)


@pytest.mark.parametrize(
    ("name", "magnitude"),
    [("ALiBi", 1.0), ("scalar", 1.0), ("bias of keys", 1e-36), ("distance", 1e36)],
)
def test_deterministic_kernels_add_to_bins(name: str, magnitude: float) -> None:
    check(name, partial=True, deterministic=True, magnitude=magnitude)


def test_what_is_no_number_is_none_in_the_sum() -> None:
    bins = torch.zeros(3, BINS, dtype=torch.int64)
    bins[0, 16] = 3 << 23 - 1  # 1.5: an integer of 24 bits times 2^(128 - 150)
    bins[1, POWERS] = 1
    torch.testing.assert_close(totals(bins), torch.tensor([3.0, math.nan, 0.0]), equal_nan=True)


def check(name: str, partial: bool, deterministic: bool = False, magnitude: float = 1.0) -> None:
    torch.manual_seed(0)
    masked = mask.define(lambda b, h, q, k: k <= q + 130) if partial else mask.full()
    variant = Variant(mask=masked, score=SCORES[name]())
    rule = Rule.of(variant.program)
    raw, upstream = torch.randn(KEYS, QUERIES), torch.randn(KEYS, QUERIES) * magnitude
    lengths = CUT if partial else INSIDE
    values, grads = raw.clone(), upstream.clone()
    bins, kind = ((BINS,), torch.int64) if deterministic else ((), torch.float32)
    shapes = [(*(c.tensor.shape or (1,)), *bins) for c in rule.receivers]
    sums = tuple(torch.zeros(shape, dtype=kind) for shape in shapes)
    spec = Spec(
        rule.dump(), "bfloat16", 64, 64, target="sm100", partial=partial,
        deterministic=deterministic,
    )  # fmt: skip
    arguments = (
        values, grads, captured(rule.captures), sums, torch.tensor(lengths, dtype=torch.int32),
        torch.tensor([B, H, FIRST_QUERY, FIRST_KEY], dtype=torch.int32),
    )  # fmt: skip
    kernel = Kernel(
        f"{mods_kernel.__name__}:tile", tuple(map(type_of, arguments)), spec, "sm100", True
    )
    with emulator("sm100"):
        in_emulator("sm100").launcher(obtain(kernel).function)(*arguments)

    q = torch.arange(FIRST_QUERY, FIRST_QUERY + QUERIES)[None].expand(KEYS, QUERIES)
    k = torch.arange(FIRST_KEY, FIRST_KEY + KEYS)[:, None].expand(KEYS, QUERIES)
    live = (q < lengths[0]) & (k < lengths[1])
    if partial:
        live &= k <= q + 130
    scaled = (raw[live] * SCALE).requires_grad_()
    variables = {"b": torch.tensor(B), "h": torch.tensor(H), "q": q[live], "k": k[live]}
    variables |= dict(zip(("seqlen_q", "seqlen_k"), map(torch.tensor, lengths), strict=True))
    (expected,) = evaluate([rule.score], variables | {"score": scaled})
    wanted = [c.tensor for c in rule.receivers]
    by_score, *by_captured = torch.autograd.grad(expected, [scaled, *wanted], upstream[live])
    if rule.score.args:  # else scores stay raw
        raw[live] = expected.detach()
    close = {"atol": 4e-3, "rtol": 4e-3}  # tanh is computed to 2^-11
    torch.testing.assert_close(values, torch.where(live, raw, -math.inf), **close)
    if not rule.is_identity:
        by_all = torch.zeros_like(raw)
        by_all[live] = by_score
        torch.testing.assert_close(grads / magnitude, by_all / magnitude, **close)
    for found, tensor in zip(sums, by_captured, strict=True):
        total = (totals(found) if deterministic else found).view(tensor.shape)
        torch.testing.assert_close(total / magnitude, tensor / magnitude, atol=2e-2, rtol=4e-3)
