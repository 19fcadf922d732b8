"""The strategies: what they draw can be built, printed, pasted and shrunk."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from fa4core import Variant
from fa4core.plan.problem import Problem
from fa4core.testing import Case, LayoutSpec, Limits, Shape, build
from fa4core.testing import strategies as kit
from fa4core.testing.prebuilt import MASKS, SCORES
from primitives import mask, score
from primitives.mask import Mask
from primitives.score import ScoreMod
from primitives.sink import Sink
from primitives.sparsity import BlockMap

TINY = Limits(batch=2, heads=2, seqlen_q=9, seqlen_k=12)
QUICK = settings(max_examples=300, phases=[Phase.generate, Phase.shrink], database=None)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        (kit.masks, Mask),
        (kit.scores, ScoreMod),
        (kit.sinks, Sink),
        (kit.block_maps, BlockMap),
        (kit.variants, Variant),
    ],
)
@settings(max_examples=15)
@given(data=st.data())
def test_values_of_their_kind(strategy, kind, data):
    assert isinstance(data.draw(strategy(TINY)), kind)


@settings(max_examples=15)
@given(value=st.one_of(kit.masks(TINY), kit.scores(TINY), kit.sinks(TINY)))
def test_names_are_source_text_that_makes_the_same_value(value):
    assert build(value.name).key == value.key


@settings(max_examples=15)
@given(case=kit.cases(lengths=(1, 0, 9, 70)))
def test_case_prints_as_source(case):
    names = {"Case": Case, "Shape": Shape, "LayoutSpec": LayoutSpec}
    assert eval(repr(case), names) == case


@settings(max_examples=30)
@given(case=kit.cases(lengths=(1, 0, 9, 70), head_dims=(8, 16)))
def test_tensors_are_what_the_case_says(case):
    inputs = case.inputs()
    problem = Problem.from_tensors(inputs.q, inputs.k, inputs.v, inputs.layout)
    s = case.shape
    assert (problem.seqlens_q, problem.seqlens_k) == (s.seqlens_q, s.seqlens_k)
    assert (problem.heads_q, problem.heads_kv) == (s.heads_q, s.heads_kv)
    assert (problem.head_dim, problem.head_dim_v) == (s.head_dim, s.head_dim_v)
    assert inputs.grad_out.shape == (*inputs.q.shape[:-1], s.head_dim_v)
    again = case.inputs()
    for name in ("q", "k", "v", "grad_out"):
        first, second = getattr(inputs, name), getattr(again, name)
        assert first.stride() == second.stride()
        assert torch.equal(first.nan_to_num(9.0), second.nan_to_num(9.0))


def test_shapes_hold_what_matters():
    def found(condition, **options):
        return find(kit.shapes(**options), condition, settings=QUICK)

    assert found(lambda s: 0 in s.seqlens_q and 129 in s.seqlens_k)
    assert found(lambda s: s.heads_q == 8 * s.heads_kv and s.head_dim != s.head_dim_v)
    assert found(lambda s: len(set(s.seqlens_q)) > 1)
    assert found(lambda s: s.batch > 1, ragged=False).is_uniform


def test_simplest_case_is_full_attention_of_one_key():
    smallest = find(kit.cases(), lambda case: True, settings=QUICK)
    assert smallest == Case()


def test_shrinks_to_the_part_that_matters():
    """A fault in causal masks of several heads is found as that and nothing more."""

    def faulty(case):
        return "mask.causal()" in case.variant and case.shape.heads_kv > 1

    smallest = find(kit.cases(), faulty, settings=settings(QUICK, max_examples=3000))
    assert smallest.variant == "Variant(mask=mask.causal())"
    assert smallest.shape == Shape((1,), (1,), 2, 2, 8, 8)
    assert (smallest.layout, smallest.contents) == (LayoutSpec(), "normal")


def test_every_prebuilt_mask_and_score_is_in_the_catalogue():
    """A new factory needs a line in `prebuilt` and a definition in `tests/soundness/naive.py`."""
    combinators = {"Mask", "define", "per_head", "select"}
    assert set(mask.__all__) - combinators == set(MASKS)
    assert set(score.__all__) - {"ScoreMod", "define", "alibi_slopes", "t5_buckets"} == set(SCORES)


def test_missing_hypothesis_is_explained():
    """The kit itself imports without Hypothesis; the strategies say what to install."""
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import fa4core.testing\n"
        "try:\n    import fa4core.testing.strategies\n"
        "except ImportError as error:\n    print(error)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "needs Hypothesis" in output and "pip install" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seqlens_q": (1, 2), "seqlens_k": (1,)}, "each sequence"),
        ({"heads_q": 3, "heads_kv": 2}, "no multiple"),
    ],
)
def test_bad_shapes(arguments, message):
    with pytest.raises(ValueError, match=message):
        Shape(**arguments)


def test_fixed_layout_of_several_lengths_is_an_error():
    with pytest.raises(ValueError, match="another layout"):
        Case(shape=Shape((1, 2), (1, 2))).inputs()
