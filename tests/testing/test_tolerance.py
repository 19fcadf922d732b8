"""The tolerance rule finds faults and lets correct computations pass."""

from __future__ import annotations

import math

import pytest
import torch

from fa4core.emulator.session import emulator
from fa4core.testing import (
    Case,
    LayoutSpec,
    Shape,
    assert_close_to_oracle,
    default_exp,
    judge,
    oracle,
    plain,
    run,
)
from fa4core.testing.check import _plain
from fa4core.testing.magnitudes import quick_errors
from fa4core.testing.tolerance import POLYNOMIAL_ERROR, Floor, compare, floor
from primitives import exp
from primitives.exp import Exp

SHAPE = Shape((65, 5), (129, 70), 4, 2, 16, 24)
TEXT = (
    "Variant(mask=mask.causal(), score=score.alibi(normal(0, 4, std=0.1)) >> score.softcap(20.0), "
    "sink=sink.learned(normal(1, 4)))"
)
DTYPES = ["float32", "bfloat16", "float16"]


def case(dtype: str = "float32") -> Case:
    return Case(TEXT, SHAPE, LayoutSpec("varlen"), dtype)


def _coarse(q, k, v, variant, *, layout, scale):
    """Attention whose outputs lose some bits: a systematic fault, nowhere large."""
    outputs = plain(q, k, v, variant, layout, scale=scale)
    coarse = outputs.out.float()
    step = torch.finfo(q.dtype).eps * (100 if q.dtype == torch.float32 else 8)
    rounded = coarse + (torch.round(coarse / step) * step - coarse).detach()
    return rounded.to(q.dtype), outputs.lse, outputs.row_max


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_torch_passes(dtype):
    inputs = case(dtype).inputs()
    assert_close_to_oracle(run(_plain, inputs), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounded_oracle_passes(dtype):
    """The best possible result."""
    inputs = case(dtype).inputs()

    def rounded(q, k, v, variant, *, layout, scale):
        out, lse, row_max = oracle(q, k, v, variant, layout=layout, scale=scale)
        return out.to(q.dtype), lse.float(), row_max.float()

    assert_close_to_oracle(run(rounded, inputs), inputs)


def _spoil(name, index, change):
    def apply(results):
        results[name] = results[name].clone()
        results[name][index] = change(results[name][index])

    return apply


FAULTS = {
    "lse by ln 2": _spoil("lse", ..., lambda x: x * math.log2(math.e)),
    "lse of one row": _spoil("lse", (1, 66), lambda x: x + 1e-3),
    "an empty row that is not": _spoil("lse", (0, 3), lambda x: x * 0 - math.inf),
    "one row of the output": _spoil("out", (64, 1), lambda x: x.flip(-1)),
    "one element": _spoil("out", (20, 0, 3), lambda x: x + 0.1),
    "a NaN": _spoil("out", (0, 0, 0), lambda x: x * math.nan),
    "output two percent off": _spoil("out", ..., lambda x: x * 1.02),
    "another head": _spoil("out", ..., lambda x: x.roll(1, -2)),
    "a lost key gradient": _spoil("dk", (3, 0), lambda x: x * 0),
    "a lost last tile": _spoil("dv", slice(128, 129), lambda x: x * 0),
    "group summed once": _spoil("dv", ..., lambda x: x / 2),
    "query gradient without scale": _spoil("dq", ..., lambda x: x * 4),
    "slope's gradient of one head": _spoil("d0", 3, lambda x: x * 0),
    "sink's gradient": _spoil("d1", ..., lambda x: -x),
    "row maximum": _spoil("row_max", (0, 0), lambda x: x + 0.01),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name, dtype):
    inputs = case(dtype).inputs()
    results = run(_plain, inputs)
    FAULTS[name](results)
    with pytest.raises(AssertionError, match="WRONG"):
        assert_close_to_oracle(results, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_of_the_lse_that_is_dropped(dtype):
    inputs = case(dtype).inputs()

    def dropped(*args, **options):
        out, lse, row_max = _plain(*args, **options)
        return out, lse.detach() + 0 * out.sum(), row_max

    wrong = {c.name for c in judge(run(dropped, inputs), inputs) if not c.ok}
    assert {"dq", "dk"} <= wrong


@pytest.mark.parametrize("dtype", DTYPES)
def test_systematic_loss_is_found(dtype):
    inputs = case(dtype).inputs()
    results = run(_coarse, inputs, backward=False)
    wrong = {c.name for c in judge(results, inputs) if not c.ok}
    assert "out" in wrong


def test_small_row_beside_a_large_one():
    """An error that the largest row would hide is found in the smallest."""
    small, large = torch.full((1, 8), 1e-3).double(), torch.full((1, 8), 1e3).double()
    expected = torch.cat([small, large])
    wrong = expected.clone()
    wrong[0] *= 1.5
    given = compare("out", wrong.float(), expected, expected.float(), expected, Floor(1e-5))
    assert not given.ok and given.where is not None and given.where[0] == 0


def test_report_names_place_and_figures():
    inputs = case().inputs()
    results = run(_plain, inputs)
    results["out"][64, 1, 5] += 1.0
    with pytest.raises(AssertionError) as error:
        assert_close_to_oracle(results, inputs, context="again: ...")
    text = str(error.value)
    assert "out: WRONG" in text and "[64, 1, 5]" in text and "1 of" in text and "again" in text
    assert text.index("out: WRONG") < text.index("lse: ok")


def test_wrong_shape_is_named():
    expected = torch.zeros(3, 4).double()
    with pytest.raises(AssertionError, match=r"dq has shape \(4, 3\)"):
        compare("dq", expected.T, expected, expected, expected, Floor())


def test_infinities_must_agree():
    expected = torch.tensor([-math.inf, 1.0]).double()
    for given, ok in ((expected, True), (expected.flip(0), False), (expected * math.nan, False)):
        size = torch.ones(2).double()
        assert compare("lse", given.float(), expected, expected, size, Floor(1e-6)).ok is ok


@pytest.mark.parametrize("degree", range(1, 7))
def test_polynomial_errors_are_bounds(degree):
    """The stated errors hold for the polynomials that the reference uses, and are not generous."""
    from fa4core.reference.exp2 import polynomial_exp2

    x = torch.linspace(-1, 0, 20001)
    error = (polynomial_exp2(x, degree).double() / torch.exp2(x.double()) - 1).abs().max()
    assert error <= POLYNOMIAL_ERROR[degree]
    assert degree > 4 or error > POLYNOMIAL_ERROR[degree] / 2
    assert floor(torch.float32, exp=exp.polynomial(degree)).policy == 2 * POLYNOMIAL_ERROR[degree]


def test_an_lse_may_be_wrong_by_the_polynomial_once():
    inputs = Case("Variant()", SHAPE, LayoutSpec("varlen"), "float16").inputs()
    results = run(_plain, inputs, backward=False)
    for error, ok in ((0.9, True), (1.5, False)):
        moved = results | {"lse": results["lse"] + error * POLYNOMIAL_ERROR[3]}
        assert all(c.ok for c in judge(moved, inputs, exp=Exp(3, 0.5))) is ok


@pytest.mark.parametrize("share", [0.0, 0.125, 1.0])
def test_functions_may_be_as_wrong_as_their_units_make_them(share):
    """Every tanh wrong by a part of what the units allow passes, by more it doesn't, and the LSE of
    no row may be wrong by what the largest score of another one allows."""
    error = quick_errors(Exp(3, share))["tanh"]

    def capped(relative: float) -> str:
        cap = f"20.0 * torch.tanh(score / 20.0) * {1.0 + relative}"
        return f"Variant(score=score.define(lambda score, b, h, q_idx, kv_idx: {cap}))"

    right = Case(capped(0.0), SHAPE, LayoutSpec("varlen"), "bfloat16").inputs()
    for part, ok in ((0.9, True), (1.5, False)):
        wrong = Case(capped(part * error), SHAPE, LayoutSpec("varlen"), "bfloat16").inputs()
        found = judge(run(_plain, wrong), right, exp=Exp(3, share))
        assert all(c.ok for c in found) is ok, found
        assert not all(c.ok for c in judge(run(_plain, wrong), right)), "no kernel, no allowance"


def test_policies_are_those_of_the_target():
    inputs = case("bfloat16").inputs()
    assert default_exp("auto", inputs) is default_exp("reference", inputs) is None
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    for name, share in (("sm90", 0.0), ("sm100", 0.25)):  # head dim 24
        with emulator(name):
            found = default_exp("emulator", inputs)
        assert found is not None and found.fraction == share
