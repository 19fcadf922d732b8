"""NaN scores that a row attends to are in its output, LSE and maximum, in every backend.

A row whose scores are all NaN has no maximum, as one that attends to nothing; they differ. And a
NaN must survive polynomials for exponentials, other blocks of keys, and the merging of split keys.
"""

from __future__ import annotations

import contextlib

import pytest
import torch

from fa4core import Variant, attention
from fa4core.emulator.session import emulator
from fa4core.reference.oracle import oracle
from primitives import exp, mask, schedule, score, sink

SINK = sink.learned(torch.tensor([0.5, -torch.inf]))
SPLIT = schedule.split_kv(2)
VARIANTS = {
    "plain": Variant(),
    "causal": Variant(mask=mask.causal()),
    "sink": Variant(mask=mask.causal(), sink=SINK),
    "polynomial": Variant(mask=mask.causal(), exp=exp.polynomial(3)),
    "split": Variant(mask=mask.causal(), sink=SINK, schedule=SPLIT),
}
BY = {
    "reference": tuple(VARIANTS),
    "sm100": ("polynomial", "split"),
    "sm90": ("polynomial",),
}


@pytest.mark.parametrize("by, name", [(by, name) for by in BY for name in BY[by]])
def test_rows_with_nan_are_those_of_the_oracle(by: str, name: str) -> None:
    if by != "reference":
        pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 300, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    many_rows, one_key, two_keys, most_keys = q.clone(), k.clone(), k.clone(), k.clone()
    many_rows[0, 5:20, 0, 3] = torch.nan
    one_key[0, 150, 0, 3] = torch.nan  # not in the first block, nor in the last
    two_keys[0, (14, 299)] = torch.nan
    most_keys[0, 1:] = torch.nan
    session = contextlib.nullcontext() if by == "reference" else emulator(by, num_sms=2)
    with session:
        for given in ((many_rows, k), (q, one_key), (q, two_keys), (q, most_keys)):
            backend = "reference" if by == "reference" else "emulator"
            results = attention(
                *given, v, VARIANTS[name], return_lse=True, return_row_max=True, backend=backend
            )
            for result, wanted in zip(results, oracle(*given, v, VARIANTS[name]), strict=True):
                assert torch.equal(result.isnan(), wanted.isnan())
                torch.testing.assert_close(
                    result.double(), wanted.double(), atol=3e-2, rtol=3e-2, equal_nan=True
                )


@pytest.mark.parametrize("policy", [exp.hardware(), exp.polynomial(3)], ids=["mufu", "polynomial"])
def test_a_score_of_plus_infinity_has_no_softmax(policy: exp.Exp) -> None:
    high = torch.where(torch.arange(300) == 150, torch.inf, 0.0)
    infinite = score.define(lambda s, b, h, q_idx, kv_idx: s + high[kv_idx])
    q, k, v = (torch.randn(1, 300, 2, 16, requires_grad=True) for _ in range(3))
    variant = Variant(mask=mask.causal(), score=infinite, exp=policy)
    got = attention(q, k, v, variant, return_lse=True, return_row_max=True)
    for out, lse, row_max in (got, oracle(q, k, v, variant)):
        assert out[:, 150:].isnan().all() and out[:, :150].isfinite().all()
        assert (row_max[..., 150:] == torch.inf).all() and row_max[..., :150].isfinite().all()
        assert not lse[..., 150:].isfinite().any() and lse[..., :150].isfinite().all()
        assert not (lse == -torch.inf).any()
    got[0].sum().backward()
    assert q.grad is not None and q.grad[:, 150:].isnan().all() and q.grad[:, :150].isfinite().all()
