"""Whole calls that Hypothesis finds: any variant, any layout, forward, backward, statistics."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4core.testing import assert_case_correct
from fa4core.testing.strategies import cases

SMALL = {"lengths": (1, 2, 0, 9, 64, 65, 130), "head_dims": (8, 16, 24, 40, 64)}


@given(case=cases(**SMALL))
def test_any_call(case):
    assert_case_correct(case)


@given(case=cases(**SMALL, dtype=st.just("float64")))
def test_any_call_in_float64(case):
    assert_case_correct(case)


@pytest.mark.sweep
@settings(max_examples=1000, derandomize=False)
@given(case=cases())
def test_any_call_at_length(case):
    assert_case_correct(case)
