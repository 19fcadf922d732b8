"""Canonical form: it preserves values, and what doesn't matter makes no difference.

Expressions are drawn as trees and written out as Python source twice: plainly, and in another
spelling (operands commuted, comparisons mirrored or negated, De Morgan's laws applied).
"""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from evaluation import evaluate, grid
from hypothesis import given, settings
from hypothesis import strategies as st

from primitives import mask, parameter, score
from primitives.expr import Node, algebra, dump, parse
from primitives.expr.node import captures

SIZES = (2, 3, 6, 7)
INDICES = grid(*SIZES[2:], *SIZES[:2])
INTS = torch.tensor([3, -1, 4, 1, -5, 9, 2])
BOOLS = torch.tensor([[True, False, True], [False, True, True]])
FLOATS = torch.tensor([0.5, -1.25, 2.0, 0.75], dtype=torch.float64)
SCALAR = parameter(2)
NAMES = {"INTS": INTS, "BOOLS": BOOLS, "FLOATS": FLOATS, "SCALAR": SCALAR, "torch": torch}

# Each operation: kinds of its operands, its spelling, and another spelling of the same (or None).
INT_OPS = [
    ("ii", "({0} + {1})", "({1} + {0})"),
    ("ii", "({0} - {1})", "(-{1} + {0})"),
    ("ii", "({0} * {1})", "({1} * {0})"),
    ("i", "(-{0})", "(0 - {0})"),
    ("i", "(3 * {0} - 4)", "({0} - 4 + {0} * 2)"),
    ("i", "(~{0})", "(-{0} - 1)"),
    ("i", "({0} // 3)", "torch.div({0}, 3, rounding_mode='floor')"),
    ("i", "({0} // -2)", None),
    ("i", "({0} % 4)", "torch.remainder({0}, 4)"),
    ("ii", "({0} // (torch.abs({1}) + 1))", "({0} // (1 + torch.abs({1})))"),
    ("ii", "({0} % (torch.abs({1}) + 1))", None),
    ("i", "torch.fmod({0}, 3)", None),
    ("i", "torch.abs({0})", "(-{0}).abs()"),
    ("ii", "torch.minimum({0}, {1})", "torch.minimum({1}, {0})"),
    ("ii", "torch.maximum({0}, {1})", "torch.maximum({1}, {0})"),
    (
        "i",
        "torch.clamp({0}, -2, 5)",
        "torch.minimum(torch.maximum({0}, torch.tensor(-2)), torch.tensor(5))",
    ),
    ("bii", "torch.where({0}, {1}, {2})", "torch.where(~{0}, {2}, {1})"),
    ("ii", "({0} & {1})", "({1} & {0})"),
    ("ii", "({0} | {1})", "({1} | {0})"),
    ("ii", "({0} ^ {1})", "({1} ^ {0})"),
    ("i", "({0} << 2)", "({0} * 4)"),
    ("i", "({0} >> 1)", "({0} // 2)"),
    ("i", "INTS[{0} % 7]", None),
    ("b", "({0}).long()", "({0}).int()"),
]
BOOL_OPS = [
    ("ii", "({0} < {1})", "({1} > {0})"),
    ("ii", "({0} <= {1})", "~({0} > {1})"),
    ("ii", "({0} > {1})", "({0} >= {1} + 1)"),
    ("ii", "({0} >= {1})", "({0} - {1} >= 0)"),
    ("ii", "({0} == {1})", "({1} == {0})"),
    ("ii", "({0} != {1})", "~({0} - {1} == 0)"),
    ("i", "(2 * {0} >= 3)", "({0} > 1)"),
    ("bb", "({0} & {1})", "~(~{1} | ~{0})"),
    ("bb", "({0} | {1})", "torch.logical_not(~{1} & ~{0})"),
    ("bb", "({0} ^ {1})", "(~{1} ^ ~{0})"),
    ("bb", "({0} == {1})", "~({1} ^ {0})"),
    ("b", "(~{0})", "({0} ^ True)"),
    ("bbb", "torch.where({0}, {1}, {2})", "torch.where(~{0}, {2}, {1})"),
    ("ii", "BOOLS[{0} % 2, {1} % 3]", None),
    ("i", "({0}).bool()", "(0 != {0})"),
    ("ff", "({0} < {1})", "({1} > {0})"),
    ("ff", "({0} >= {1})", "({1} <= {0})"),
    ("ff", "({0} == {1})", "({1} == {0})"),
]
FLOAT_OPS = [
    ("i", "({0}).double()", "({0}).to(torch.float64)"),
    ("ff", "({0} + {1})", "({1} + {0})"),
    ("ff", "({0} - {1})", None),
    ("ff", "({0} * {1})", "({1} * {0})"),
    ("f", "({0} / 4)", None),
    ("f", "(-{0})", None),
    ("f", "torch.abs({0})", None),
    ("ff", "torch.minimum({0}, {1})", "torch.minimum({1}, {0})"),
    ("ff", "torch.maximum({0}, {1})", "torch.maximum({1}, {0})"),
    ("f", "torch.tanh({0})", None),
    ("f", "({0} * 0.1).exp()", None),
    ("f", "torch.floor({0})", None),
    ("f", "({0} // 0.75)", None),
    ("f", "({0} % 0.75)", None),
    ("f", "({0} ** 2)", "({0} * {0})"),
    ("bff", "torch.where({0}, {1}, {2})", "torch.where(~{0}, {2}, {1})"),
    ("i", "FLOATS[{0} % 4]", None),
]
LEAVES = {
    "i": ["q", "k", "b", "h", "SCALAR", *map("torch.tensor({})".format, (-3, 0, 1, 7))],
    "b": ["(q < k)", "(b == 1)", "BOOLS[b, h]", "(q >= SCALAR)"],
    "f": ["q.double()", "FLOATS[h]", "torch.tensor(0.5, dtype=torch.float64)"],
}
OPS = {"i": INT_OPS, "b": BOOL_OPS, "f": FLOAT_OPS}


@st.composite
def spellings(draw, kind, depth=4):
    """Two Python expressions of one value."""
    if depth == 0 or draw(st.integers(0, 5)) == 0:
        leaf = draw(st.sampled_from(LEAVES[kind]))
        return leaf, leaf
    kinds, plain, other = draw(st.sampled_from(OPS[kind]))
    parts = [draw(spellings(k, depth - 1)) for k in kinds]
    first = plain.format(*(p for p, _ in parts))
    return first, (other or plain).format(*(o for _, o in parts))


def function(source: str, names: str = "b, h, q, k"):
    return eval(f"lambda {names}: {source}", dict(NAMES))


def node_of(source: str, kind: str) -> Node:
    if kind == "b":
        return mask.define(function(source)).expr
    if kind == "i":
        return mask.define(function(f"{source} == 0")).expr
    return score.define(function(f"{source}", "score, b, h, q, k")).expr


def by_torch(source: str) -> torch.Tensor:
    indices = [INDICES[n] for n in "bhqk"]
    return torch.as_tensor(function(source)(*indices)).broadcast_to(SIZES)


@settings(max_examples=50)
@given(spellings("b"))
def test_masks_keep_their_value(pair):
    given_value = evaluate(node_of(pair[0], "b"), INDICES).broadcast_to(SIZES)
    assert torch.equal(given_value, by_torch(pair[0]))


@settings(max_examples=30)
@given(spellings("i"))
def test_integers_keep_their_value(pair):
    given_value = evaluate(node_of(pair[0], "i"), INDICES).broadcast_to(SIZES)
    assert torch.equal(given_value, by_torch(pair[0]) == 0)


@settings(max_examples=30)
@given(spellings("f"))
def test_scores_keep_their_value(pair):
    given_value = evaluate(node_of(pair[0], "f"), INDICES).broadcast_to(SIZES)
    torch.testing.assert_close(given_value, by_torch(pair[0]), rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", "bif")
@given(data=st.data())
@settings(max_examples=25)
def test_spelling_does_not_matter(kind, data):
    plain, other = data.draw(spellings(kind, depth=3))
    assert node_of(plain, kind) is node_of(other, kind), f"{plain}\n{other}"


@given(spellings("b"))
def test_dump_and_parse(pair):
    node = node_of(pair[0], "b")
    text = dump([node, node])
    tensors = [c.tensor for c in captures(node)]
    assert parse(text, tensors) == (node, node)
    assert dump(parse(text)) == text  # with placeholders in place of the tensors
    assert dump([eval_renamed(pair[0])]) == dump([node])


def eval_renamed(source: str) -> Node:
    """The same function with other argument names."""
    renamed = eval(
        f"lambda batch, head, row, column: (lambda b, h, q, k: {source})(batch, head, row, column)",
        dict(NAMES),
    )
    return mask.define(renamed).expr


def test_a_choice_of_truth_values_is_logic():
    chosen = mask.define(lambda b, h, q, k: torch.where(q < k, b == 1, h == 2))
    assert chosen == mask.define(lambda b, h, q, k: ((q < k) & (b == 1)) | ((q >= k) & (h == 2)))


def test_float_negation_respects_nan():
    less = score.define(lambda s, b, h, q, k: torch.where(s < 1.0, 0.0, 1.0)).expr
    greater = score.define(lambda s, b, h, q, k: torch.where(s >= 1.0, 1.0, 0.0)).expr
    nan = {"score": torch.tensor(math.nan, dtype=torch.float64)}
    assert evaluate(less, nan) == 1.0 and evaluate(greater, nan) == 0.0


def test_not_a_number_is_one_constant():
    assert algebra.const(math.nan) is algebra.const(math.inf - math.inf)
    assert algebra.extremum("min", 1.0, math.nan) is algebra.const(math.nan)
    assert algebra.const(0.0) is not algebra.const(-0.0)


def test_one_compile_key_for_new_closures_widths_and_tensors():
    def build(width, table, rows):
        bound, ids = parameter(width), torch.arange(rows) // 2

        def inner(b, h, q_idx, kv_idx):
            return (q_idx - kv_idx <= bound) & (ids[q_idx] == ids[kv_idx])

        return mask.define(inner) & mask.sliding_window(width), score.alibi(table)

    first, second = build(3, torch.rand(4), 10), build(7, torch.rand(9), 20)
    assert [x.key for x in first] == [x.key for x in second]
    assert first[0] != second[0]
    doubles = score.alibi(torch.rand(4).double())
    assert doubles.key != first[1].key  # another dtype is another kernel


LIMIT = 3


def test_defaults_globals_and_closures_matter():
    def with_default(limit):
        return mask.define(lambda b, h, q, k, limit=limit: q - k <= limit)

    def with_closure(limit):
        return mask.define(lambda b, h, q, k: q - k <= limit)

    def with_global(limit):
        source = "lambda b, h, q, k: q - k <= LIMIT"
        return mask.define(eval(source, {"LIMIT": limit}))

    for build in (with_default, with_closure, with_global):
        assert build(3).key != build(4).key
        assert build(3) == build(3) == mask.define(lambda b, h, q, k: q - k <= LIMIT)


def test_keys_are_the_same_in_every_process():
    import subprocess
    import sys

    program = (
        "from primitives import mask, score\n"
        "print((mask.causal() & mask.sliding_window(5) | mask.natten((4, 4), 3)).key)\n"
        "print((score.alibi(4) >> score.softcap(3.0)).key)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    masks = mask.causal() & mask.sliding_window(9) | mask.natten((5, 6), 2)
    scores = score.alibi(6) >> score.softcap(5.0)
    assert run.stdout == f"{masks.key}\n{scores.key}\n"


def test_nodes_pickle_to_themselves():
    node = mask.causal().expr
    assert pickle.loads(pickle.dumps(node)) is node


def test_keys_do_not_depend_on_the_order_of_values():
    def build(left, slack, right):
        bounds = [parameter(x) for x in (left, slack, right)]
        return mask.define(
            lambda b, h, q, k: (q - k <= bounds[0] - bounds[1]) & (k < bounds[2] + q)
        )

    keys = {build(*values).key for values in ((1, 2, 3), (3, 2, 1), (2, 2, 2), (5, 1, 3))}
    assert len(keys) == 1


def test_prebuilt_values_bind_to_one_trace():
    """A second build reuses the first one's trace; nothing of the first build's values stays."""
    slopes = [torch.rand(4, requires_grad=True) for _ in range(2)]
    first, second = map(score.alibi, slopes)
    assert first.key == second.key and first.expr is not second.expr
    for mod, own in zip((first, second), slopes, strict=True):
        assert mod.tensors == (own,)
        (row,) = mod.gradient().captured
        assert row[0].tensor is own and mod.gradient().wrt == {row[0]}
    fixed = score.alibi(slopes[0].detach())
    assert fixed.gradient().captured == () and fixed.gradient().wrt == frozenset()
    same = parameter(3)
    assert len(mask.sliding_window(same, same).tensors) == 1
    assert len(mask.sliding_window(3, 3).tensors) == 2
    assert mask.sliding_window(4, None).key != mask.sliding_window(4, 4).key
    assert mask.causal("top_left").key != mask.causal().key


sizes = st.integers(1, 9)


@given(st.lists(sizes, min_size=6, max_size=6), st.lists(sizes, min_size=6, max_size=6))
def test_keys_do_not_depend_on_sizes(first, second):
    def build(a, b, c, d, e, f):
        return (
            mask.sliding_window(a, b) & mask.chunked(c) | mask.prefix_lm(d) & mask.sink_tokens(e),
            mask.natten((a + b, c + d), (min(a, 2), min(c, 2))) ^ mask.global_tokens(f),
            mask.dilated_window(a, b, c) - mask.block_diffusion(d, e) | mask.random(1 / f, a),
            mask.block_causal(a) & mask.block_causal(b) & mask.sink_tokens(a),
        )

    for x, y in zip(build(*first), build(*second), strict=True):
        assert x.key == y.key
