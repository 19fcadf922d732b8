"""Words of masks against the truth of every element: random masks, and those everybody uses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from fa4core.lowering.torch import evaluate
from fa4core.lowering.words import Edge, edge, is_word, leaves, split, word
from fa4core.testing.case import Limits
from fa4core.testing.strategies import masks
from primitives import mask, parameter
from primitives.expr import Node, walk
from primitives.expr import algebra as A

LENGTH_Q, LENGTH_K = 40, 70
ALL = (1 << 32) - 1
K, Q = A.var("k"), A.var("q")


def row(node: Node, q: int) -> int:
    """The value of a node that is fixed in the row of query `q`."""
    return value(node, q, torch.tensor(0)).item()


def value(node: Node, q: int, keys: torch.Tensor) -> torch.Tensor:
    sizes = {"b": 1, "h": 1, "q": q, "seqlen_q": LENGTH_Q, "seqlen_k": LENGTH_K}
    variables = {name: torch.tensor(n) for name, n in sizes.items()} | {"k": keys}
    return evaluate([node], variables, live=torch.tensor(False))[0]  # tables may be too small


def bits(node: Node, q: int, first: int) -> int:
    """The word of a node for the keys `first`, `first + 1`, ..., as hardware would make it."""

    def of_edge(found: Edge) -> int:
        behind = max(row(found.bound, q) - first, 0)
        rising = ALL << behind & ALL if behind < 32 else 0
        return rising if found.rising else ~rising

    return word(node, of_edge, lambda n: ALL if row(n, q) else 0) & ALL


def check(node: Node) -> None:
    """Words of all conditions in a graph that have one, some rows and all key positions."""
    for condition in walk(node):
        if condition.kind != "bool" or not is_word(condition):
            continue
        for q in (0, 7, LENGTH_Q - 1):
            for first in (0, 32, 38):
                keys = torch.arange(first, first + 32)
                truth = value(condition, q, keys).expand(32).tolist()
                got = bits(condition, q, first)
                assert [bool(got >> i & 1) for i in range(32)] == truth, (condition, q, first)


@given(masks(Limits(LENGTH_Q, 128, 2, 2)))
def test_words_of_random_masks_are_the_truth_of_every_key(m) -> None:
    check(m.expr)


WIDTH = parameter(9)
FAMILIAR = {
    "causal": mask.causal(),
    "window": mask.sliding_window(5, 3),
    "window of run-time width": mask.sliding_window(WIDTH, 0),
    "sinks": mask.causal() & (mask.sliding_window(5, 0) | mask.sink_tokens(4)),
    "outside": ~mask.sliding_window(5, 3),
    "symmetric difference": mask.causal() ^ mask.sliding_window(5, 3),
    "blocks": mask.define(lambda b, h, q, k: q // 32 >= k // 32),
    "diagonal": mask.define(lambda b, h, q, k: q == k),
    "strided bound": mask.define(lambda b, h, q, k: 3 * k - 2 * q < 17),
    "other stride": mask.define(lambda b, h, q, k: (q * q + 5 - 4 * (k // 3 - 2)) // 2 >= 7),
}


@pytest.mark.parametrize("name", FAMILIAR)
def test_familiar_masks_are_words_as_a_whole(name: str) -> None:
    assert is_word(FAMILIAR[name].expr)
    check(FAMILIAR[name].expr)


def test_what_is_not_monotone_in_the_key_has_no_word() -> None:
    for node in (A.mod(K, 3), A.sub(K, A.floordiv(K, 2)), A.mul(K, K), A.floordiv(K, Q)):
        assert edge(A.less_equal(0, node)) is None


def test_conditions_without_a_word_are_the_leaves_of_the_others() -> None:
    causal, odd = A.less_equal(K, Q), A.equal(A.mod(K, 2), 1)
    both = A.logical_and(causal, odd, A.less(K, 9))
    joined, rest = split(both)
    assert joined is not None and is_word(joined) and len(joined.args) == 2
    assert rest == leaves(both) == leaves(A.logical_not(both)) == [odd]
    assert leaves(causal) == []
