"""The graph and the oracle against a second reading of the same source text (`naive`)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import attend, dense_mask, read

from fa4core.plan.problem import Problem
from fa4core.testing import Case, LayoutSpec, Limits, Shape, build, oracle, run
from fa4core.testing.dense import sequences
from fa4core.testing.prebuilt import MASKS, SCORES
from fa4core.testing.strategies import cases, mask_sources
from fa4core.testing.tilemap import truth

LIMITS = Limits(batch=2, heads=3, seqlen_q=90, seqlen_k=140)
LENGTHS = st.tuples(st.sampled_from([90, 1, 64, 0]), st.sampled_from([140, 1, 65, 0]))

#: Many parameters, so few examples each.
FEW = settings(max_examples=max(6, settings.default.max_examples // 4))


def assert_same_mask(text: str, lengths: tuple[int, int]) -> None:
    node = build(text).expr
    for b in range(LIMITS.batch):
        given_mask = truth(node, b, LIMITS.heads, *lengths)
        assert torch.equal(given_mask, dense_mask(text, b, LIMITS.heads, *lengths)), text


@pytest.mark.parametrize("name", MASKS)
@FEW
@given(data=st.data())
def test_prebuilt_mask_is_its_definition(name, data):
    assert_same_mask(data.draw(MASKS[name](LIMITS)), data.draw(LENGTHS))


@given(text=mask_sources(LIMITS, depth=3), lengths=LENGTHS)
def test_composed_mask_is_its_definition(text, lengths):
    assert_same_mask(text, lengths)


def assert_oracle_is_textbook(case: Case) -> None:
    inputs = case.inputs()
    given_results = run(oracle, inputs)
    reading = read(case.variant)
    q, k, v = (t.detach().double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    problem = Problem.from_tensors(q, k, v, inputs.layout)
    loss = torch.zeros((), dtype=torch.float64)
    out = torch.zeros_like(given_results["out"])
    lse = torch.full_like(given_results["lse"], -torch.inf)
    for rows in sequences(problem, inputs.layout):
        out_b, lse_b = attend(
            reading.value, rows.b, rows.queries(q), rows.keys(k), rows.keys(v), q.shape[-1] ** -0.5
        )
        out[rows.q], lse.transpose(-1, -2)[rows.q] = out_b.detach(), lse_b.detach()
        loss = loss + (out_b * rows.queries(inputs.grad_out)).sum()
        grad_lse = rows.queries(inputs.grad_lse.transpose(-1, -2)).double()
        loss = loss + torch.where(lse_b.isfinite(), lse_b * grad_lse, 0.0).sum()
    leaves = [q, k, v, *(leaf for _, leaf in reading.learned)]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    expected = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), gradients, strict=False))
    for name, value in expected.items():
        torch.testing.assert_close(
            given_results[name].double(), value, rtol=1e-5, atol=2e-5, msg=f"{name} of {case}"
        )
    # Tables of one text with equal values can't be told apart: their gradients are added up.
    for values in {id(t): t for t, _ in reading.learned}.values():
        same = [i for i, t in enumerate(inputs.learned) if torch.equal(t, values)]
        total = sum(given_results[f"d{i}"].double() for i in same)
        wanted = sum(
            g
            for (t, _), g in zip(reading.learned, gradients[3:], strict=True)
            if g is not None and torch.equal(t, values)
        )
        if same:
            torch.testing.assert_close(
                total, wanted + torch.zeros_like(total), rtol=1e-4, atol=1e-4, msg=str(case)
            )


@given(case=cases(dtype=st.just("float64"), lengths=(1, 2, 0, 9, 33, 70), head_dims=(8, 16, 24)))
def test_oracle_is_textbook_attention(case):
    assert_oracle_is_textbook(case)


SHAPE = Shape((33, 5), (40, 9), 2, 1, 8, 8)


@pytest.mark.parametrize("name", SCORES)
@FEW
@given(data=st.data())
def test_prebuilt_score_is_its_definition(name, data):
    text = f"Variant(score={data.draw(SCORES[name](SHAPE.limits))})"
    assert_oracle_is_textbook(Case(text, SHAPE, LayoutSpec("varlen"), "float64"))
