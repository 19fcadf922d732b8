"""Score mods as `factor * rest`: the same numbers, with fewer multiplications."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from fa4core.lowering.affine import change
from fa4core.lowering.factors import ONE, SCALE, SCORE, Factored, factored
from fa4core.lowering.torch import evaluate
from fa4core.lowering.words import per_element
from fa4core.testing.strategies import scores
from primitives import score
from primitives.expr import Node, walk
from primitives.score import ScoreMod

LEAST = 2.0**-64
SIGNED = torch.tensor([0.5, -2.0])
WITH_ZERO = torch.tensor([0.0, 3.0])
INDICES = {name: torch.tensor(n) for name, n in {"seqlen_q": 9, "seqlen_k": 9}.items()} | {
    "b": torch.arange(2)[:, None, None, None],
    "h": torch.arange(2)[:, None, None],
    "q": torch.arange(9)[:, None],
    "k": torch.arange(9),
}
RAW = 4 * torch.randn(2, 2, 9, 9, generator=torch.Generator().manual_seed(0)).double()

EVEN = score.define(lambda s, b, h, q, k: s - SIGNED[h] * (q - k))
MODS = {
    "plain": (score.identity(), 0),
    "a cap": (score.softcap(3.0), 1),
    "negative and positive caps": (
        score.define(lambda s, b, h, q, k: SIGNED[h] * torch.tanh(s / SIGNED[h])),
        1,
    ),
    "a cap of 0": (
        score.define(lambda s, b, h, q, k: WITH_ZERO[h] * torch.tanh(s / WITH_ZERO[h])),
        1,
    ),
    "no cap at all": (score.define(lambda s, b, h, q, k: WITH_ZERO[h] * torch.tanh(s)), 1),
    "a cap of a cap": (score.softcap(3.0) >> score.softcap(2.0), 2),
    "a factor of each sign": (score.head_scale(SIGNED), 1),
    "an even bias": (EVEN, 0),
    "a cap of a bias": (EVEN >> score.softcap(5.0), 1),
    "not odd": (score.define(lambda s, b, h, q, k: -torch.sigmoid(-2 * s / 3.0) * 4), 2),
    "magnitudes": (score.define(lambda s, b, h, q, k: torch.abs(s * -2) / 3.0), 0),
    "a choice": (score.define(lambda s, b, h, q, k: torch.where(q > k, 2 * s, -s) / 7), 3),
}


def of(mod: ScoreMod) -> Factored:
    return factored(mod.expr, LEAST)


def values(root: Node, scale: float, scaled: bool = False) -> torch.Tensor:
    given = {
        "score": RAW * scale if scaled else RAW,
        "scale": torch.tensor(scale, dtype=torch.float64),
    }
    return evaluate([root], INDICES | given, dtype=torch.float64)[0].expand(RAW.shape)


def same(mod: ScoreMod, scale: float) -> None:
    form, right = of(mod), values(mod.expr, scale, scaled=True)
    found = values(form.factor, scale) * values(form.rest, scale)
    torch.testing.assert_close(found, right, atol=1e-12, rtol=1e-12, equal_nan=True)
    found = values(form.whole, scale)
    torch.testing.assert_close(found, right, atol=1e-12, rtol=1e-12, equal_nan=True)


@pytest.mark.parametrize("name", MODS)
def test_values_stay_and_multiplications_of_elements_go(name: str) -> None:
    mod, most = MODS[name]
    for scale in (1.0, 0.3):
        same(mod, scale)
    form = of(mod)
    assert not per_element(form.factor)
    assert (values(form.factor, 0.3) > 0).all()
    nodes = list(walk(form.rest))
    products = [n for n in nodes if n.op in ("mul", "div") and per_element(n)]
    products = [n for n in products if change(n) is None]  # those are computed once for a row
    assert len(products) <= most


@given(scores())
def test_values_of_any_mod_stay(mod: ScoreMod) -> None:
    same(mod, 0.3)


def test_what_is_known_of_factors() -> None:
    assert of(score.identity()) == Factored(SCALE, SCORE)
    assert of(score.head_scale(SIGNED)).factor is ONE  # it may be negative
    assert factored(score.identity().expr, LEAST, positive=False).factor is ONE
    tiny = score.define(lambda s, b, h, q, k: 1e-30 * torch.tanh(s))
    assert of(tiny).factor is ONE  # -inf times it would not be


def test_a_factor_below_the_least_is_no_other_where_the_rest_may_be_large() -> None:
    tiny = torch.tensor([0.0, 1e-30])
    for mod in (
        score.define(lambda s, b, h, q, k: tiny[h].abs() * torch.exp(60 + s)),
        score.define(lambda s, b, h, q, k: tiny[h] * torch.sinh(60 + s)),
        score.define(lambda s, b, h, q, k: tiny[h].abs() * (s - 1e30 * (k > q))),
    ):
        same(mod, 0.3)


def test_a_factor_that_is_nan_stays() -> None:
    nan = torch.tensor([math.nan, 1.0])
    for mod in (
        score.define(lambda s, b, h, q, k: nan[h].abs() * s),
        score.define(lambda s, b, h, q, k: nan[h] * torch.tanh(s)),
    ):
        same(mod, 0.3)


def test_an_even_bias_joins_the_raw_score_unless_it_is_the_same_for_all_keys() -> None:
    assert of(EVEN).even is not None
    assert of(score.define(lambda s, b, h, q, k: s + SIGNED[h])).even is None
    assert of(score.softcap(3.0) >> EVEN).even is None
