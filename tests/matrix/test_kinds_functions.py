"""Known ways to go wrong with mask and score functions and the tensors they capture.

As `test_kinds`: they hold for every backend; here the default one runs.
"""

from __future__ import annotations

import pytest
import torch
from calls import RAGGED, tensors

from fa4core import Variant, attention
from fa4core.testing import Case, LayoutSpec, Shape, assert_case_correct
from primitives import mask, score

# ------------------------------------------------------------------------- captured tensors


@pytest.mark.parametrize("kind", ["fixed", "varlen", "paged"])
def test_tables_of_exactly_the_problems_size(kind):
    """At an edge tile a mod must not be asked about rows and columns that don't exist."""
    text = (
        "Variant(mask=mask.define(lambda b, h, q_idx, kv_idx, t=bits(0, 130, 70, density=0.8): "
        "t[q_idx, kv_idx]), score=score.dense_bias(normal(0, 1, 2, 130, 70)))"
    )
    assert_case_correct(Case(text, Shape((130,), (70,), 2, 1, 16, 16), LayoutSpec(kind)))


@pytest.mark.parametrize("shape", [(129, 70), (130, 69)])
def test_a_table_that_is_too_small_is_an_error(shape):
    q, k, v = tensors(130, 70)
    bias = torch.zeros(shape)
    with pytest.raises(IndexError, match=r"size (129|69)"):
        attention(q, k, v, Variant(score=score.dense_bias(bias)))


def test_an_index_outside_where_nothing_is_attended_to_does_not_matter():
    text = (
        "Variant(mask=mask.causal(), score=score.define("
        "lambda score, b, h, q_idx, kv_idx, t=normal(0, 70): score + t[q_idx - kv_idx]))"
    )
    assert_case_correct(Case(text, Shape((70,), (70,), 2, 1, 16, 16)))


CAPTURES = {
    "two indexings of one table": "t=normal(0, 70): score + t[q_idx] * t[kv_idx]",
    "thrice": "t=normal(0, 9): score + t[q_idx % 9] + t[kv_idx % 9] * t[(q_idx + kv_idx) % 9]",
    "a scalar": "t=normal(0): score * t",
    "a scalar twice": "t=normal(0): score * t + t",
    "a per-head table": "t=normal(0, 3): score * t[h]",
    "constant and computed indices": "t=normal(0, 3, 4): score + t[h, 0] * t[h, kv_idx % 4]",
    "a computed index": "t=normal(0, 3, 8), u=integers(1, 70, high=8): score + t[h, u[kv_idx]]",
    "two tables": "t=normal(0, 70), u=normal(1, 3): score * u[h] + t[kv_idx]",
    "one with, one without grad": "t=normal(0, 70), u=normal(1, 70, grad=False): score + t[kv_idx] * u[q_idx]",  # noqa: E501
    "batch and head": "t=normal(0, 2, 3): score * t[b, h]",
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CAPTURES)
def test_gradients_of_captured_tensors(name, dtype):
    text = f"Variant(score=score.define(lambda score, b, h, q_idx, kv_idx, {CAPTURES[name]}))"
    shape = Shape((70, 70), (70, 70), 3, 1, 16, 16)
    assert_case_correct(Case(text, shape, dtype=dtype))


def test_one_table_in_mod_and_sink_collects_both_gradients():
    text = "(lambda t: Variant(score=score.head_scale(t), sink=sink.learned(t)))(normal(0, 4))"
    assert_case_correct(Case(text, RAGGED, LayoutSpec("varlen")))


def test_strided_and_expanded_tables():
    text = (
        "(lambda t: Variant(score=score.define(lambda score, b, h, q_idx, kv_idx: score"
        " + t[:, ::2].T[kv_idx % 5, h])))(normal(0, 4, 10))"
    )
    assert_case_correct(Case(text, RAGGED, LayoutSpec("varlen")))


# --------------------------------------------------------------- functions that look alike


def test_lambdas_that_differ_in_a_default_differ():
    def make(width):
        return mask.define(lambda b, h, q_idx, kv_idx, w=width: q_idx - kv_idx <= w)

    q, k, v = tensors()
    narrow, wide = (attention(q, k, v, Variant(make(w) & mask.causal())) for w in (1, 30))
    assert make(1).key != make(30).key
    assert not torch.allclose(narrow, wide)


FACTOR = 2.0


def test_functions_that_differ_in_a_closure_or_global_differ(monkeypatch):
    def make(c):
        return score.define(lambda s, b, h, q_idx, kv_idx: s * c)

    def by_global():
        return score.define(lambda s, b, h, q_idx, kv_idx: s * FACTOR)

    before = by_global()
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    q, k, v = tensors()
    results = [attention(q, k, v, Variant(score=s)) for s in (make(2.0), make(3.0))]
    assert make(2.0).key != make(3.0).key and not torch.allclose(*results)
    assert torch.equal(attention(q, k, v, Variant(score=before)), results[0])
    assert torch.equal(attention(q, k, v, Variant(score=by_global())), results[1])


def test_new_widths_and_tables_are_used_not_the_old_ones():
    q, k, v = tensors()
    for width in (3, 40, 0):
        variant = Variant(mask.sliding_window(width))
        near = mask.define(lambda b, h, q_idx, kv_idx, w=width: (q_idx - kv_idx).abs() <= w)
        expected = attention(q, k, v, Variant(near & mask.causal()))
        assert torch.allclose(attention(q, k, v, variant), expected)


def test_a_table_changed_in_place_is_read_again():
    q, k, v = tensors()
    table = torch.zeros(70, dtype=torch.int32)
    variant = Variant(mask.document(table))
    before = attention(q, k, v, variant)
    table[35:] = 1
    after = attention(q, k, v, variant)
    assert not torch.allclose(before, after)
    assert torch.equal(after, attention(q, k, v, Variant(mask.document(table.clone()))))
