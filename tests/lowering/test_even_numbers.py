"""Forms that kernels compute more cheaply: what the mask implies, and what changes evenly."""

from __future__ import annotations

import pytest
import torch

from fa4core.lowering.affine import change, even
from fa4core.lowering.assume import where_attended
from fa4core.lowering.torch import evaluate
from primitives import mask, score
from primitives.expr import Node, walk

SLOPES = torch.tensor([0.5, 2.0])
SIZES = {"seqlen_q": 9, "seqlen_k": 9, "b": 0}
INDICES = {name: torch.tensor(n) for name, n in SIZES.items()} | {
    "h": torch.arange(2)[:, None, None],
    "q": torch.arange(9)[:, None],
    "k": torch.arange(9),
    "score": torch.randn(2, 9, 9, generator=torch.Generator().manual_seed(0)),
}
CAUSAL = mask.causal()  # with its ends aligned
EARLIER = mask.define(lambda b, h, q, k: q >= k)

EVEN = {
    "distances": lambda s, b, h, q, k: s + SLOPES[h] * (3 * q - 2 * k + 5) / 4.0,
    "several": lambda s, b, h, q, k: s * SLOPES[h] - (k * 0.5 + SLOPES[h] * (k - q)),
}
OTHERS = {
    "a square": lambda s, b, h, q, k: s + (k - q) * (k - q) * 0.5,
    "an integer quotient": lambda s, b, h, q, k: s + (k // 3) * 0.5,
}


def values(root: Node) -> torch.Tensor:
    return evaluate([root], INDICES)[0].expand(2, 9, 9)


@pytest.mark.parametrize("name", EVEN)
def test_what_changes_evenly_does_so_by_its_change(name: str) -> None:
    root = score.define(EVEN[name]).expr
    (part,) = even(root)
    by = change(part)
    assert by is not None and "k" not in by.free and part.free & {"k"}
    steps = values(part).diff(dim=-1)
    torch.testing.assert_close(steps, values(by)[..., 1:].float())


@pytest.mark.parametrize("name", OTHERS)
def test_other_numbers_are_left_alone(name: str) -> None:
    assert not even(score.define(OTHERS[name]).expr)


@pytest.mark.parametrize(
    "given, mod",
    [
        (CAUSAL, score.alibi(SLOPES)),
        (EARLIER, score.define(lambda s, b, h, q, k: s + (q - k).clamp(min=0) * 0.25)),
        (EARLIER, score.define(lambda s, b, h, q, k: torch.where(q >= k, s, -s))),
    ],
)
def test_what_the_mask_implies_changes_no_pair_that_counts(given, mod) -> None:
    (simpler,) = where_attended((given & mask.sliding_window(5, 0)).expr, [mod.expr])
    assert not {node.op for node in walk(simpler)} & {"abs", "max", "where"}
    attended = values(given.expr)
    assert torch.equal(values(simpler)[attended], values(mod.expr)[attended])


def test_without_a_mask_a_distance_stays_one() -> None:
    (same,) = where_attended(mask.full().expr, [score.alibi(SLOPES).expr])
    assert torch.equal(values(same), values(score.alibi(SLOPES).expr))
    assert any(node.op == "abs" and node.kind == "float" for node in walk(same))
