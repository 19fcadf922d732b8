"""Straight lines, and score mods where a mask holds: worth what the graph is worth."""

from __future__ import annotations

import pytest
import torch

from fa4core import Variant
from fa4core.lowering.affine import Line, line
from fa4core.lowering.assume import assuming
from fa4core.lowering.torch import evaluate
from fa4core.lowering.words import per_element
from primitives import mask, score
from primitives.expr import Node, algebra, walk

Q, K, SCORE = (algebra.var(name) for name in ("q", "k", "score"))
SLOPES = torch.tensor([0.5, 2.0])
BOTH_SIDES = "score + slopes[h] * (q - k)"


def graph_of(**variant) -> tuple[Node, Node]:
    graph = Variant(**variant).program.graph
    return graph.mask, graph.score


def variables(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    """300 queries and 320 keys of two heads."""
    generator = torch.Generator().manual_seed(0)
    numbers = {
        "b": torch.tensor(0),
        "h": torch.arange(2)[:, None, None],
        "q": torch.arange(300)[:, None],
        "k": torch.arange(320),
        "seqlen_q": torch.tensor(300),
        "seqlen_k": torch.tensor(320),
        "score": torch.randn(2, 300, 320, generator=generator, dtype=torch.float64),
    }
    return numbers | more


def value(node: Node, **more: torch.Tensor) -> torch.Tensor:
    (found,) = evaluate([node], variables(**more), dtype=torch.float64)
    return found.expand(2, 300, 320)


def lined(b, h, q, k):
    return 3.0 * (k - 2 * q + 7) / 4.0


SCORES = {
    "ALiBi": (score.alibi(SLOPES), True),
    "both sides": (score.define(lambda s, b, h, q, k: s + SLOPES[h] * (q - k)), True),
    "nested": (score.define(lambda s, b, h, q, k: -(2.0 * s - lined(b, h, q, k)) * 0.5 + q), True),
    "key only": (score.define(lambda s, b, h, q, k: (k * 3 - q).float()), True),
    "quadratic": (score.define(lambda s, b, h, q, k: s + (k * k).float()), False),
    "product": (score.define(lambda s, b, h, q, k: s * (q - k)), False),
    "halves": (score.define(lambda s, b, h, q, k: s + (k // 2).float()), False),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_line_is_worth_what_its_node_is(name: str) -> None:
    """Followed from any first key."""
    mod, straight = SCORES[name]
    where, node = graph_of(mask=mask.causal(), score=mod)
    node = assuming(where, node)
    found = line(node)
    assert (found is not None) == straight
    if found is None:
        return
    first = torch.tensor(64)
    keys, scores = variables()["k"], variables()["score"]
    assert isinstance(found, Line)
    assert not per_element(found.factor) and not per_element(found.slope)
    got = value(found.bias, k=first) + value(found.slope) * (keys - first)
    got = got + value(found.factor) * scores
    assert torch.allclose(got, value(node), rtol=1e-12, atol=1e-9)


MASKS = {
    "causal": mask.causal(),
    "causal window": mask.causal() & mask.sliding_window(100),
    "two sides": mask.sliding_window(100, 20),
    "future": mask.define(lambda b, h, q, k: k >= q + 3),
    "either": mask.causal() | mask.sliding_window(50, 50),
}
MODS = {
    "ALiBi": score.alibi(SLOPES),
    "decay": score.decay(torch.tensor([0.5, 0.9])),
    "where": score.define(
        lambda s, b, h, q, k: torch.where(q >= k, s, 2.0 * s) + (k - q).abs().float()
    ),
}


@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("name", MASKS)
def test_what_a_mask_lets_one_assume_changes_nothing_where_it_holds(name: str, mod: str) -> None:
    where, node = graph_of(mask=MASKS[name], score=MODS[mod])
    holds = value(where)
    assert torch.equal(value(assuming(where, node))[holds], value(node)[holds])


def test_under_a_causal_mask_alibi_is_a_line() -> None:
    where, node = graph_of(mask=mask.causal(), score=score.alibi(SLOPES))
    assert "abs" in {n.op for n in walk(node)}
    assert "abs" not in {n.op for n in walk(assuming(where, node))}
    _, free = graph_of(score=score.alibi(SLOPES))
    assert "abs" in {n.op for n in walk(assuming(graph_of()[0], free))}
