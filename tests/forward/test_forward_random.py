"""Random variants, shapes and layouts from the testing kit: Blackwell's kernels in the emulator,
Hopper's there or on a Hopper GPU.

A few by default; `HYPOTHESIS_PROFILE=sweep pytest -m sweep tests/forward/test_forward_random.py`
runs 208 of each target, each with several seeds of the emulator, that is, orders in which
asynchronous work takes effect.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, assume, given, settings
from supported import supported

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from both import on_both
from sm90 import hopper

from fa4core.backends import KERNELS
from fa4core.emulator.session import emulator
from fa4core.plan.problem import Problem
from fa4core.testing import Case, assert_close_to_oracle, by_backend, default_exp, run
from fa4core.testing.strategies import cases

NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # every example is a compilation


def check(target: str, case: Case, seeds: int = 1) -> None:
    case = supported(case)
    inputs = case.inputs()
    problem = Problem.from_tensors(inputs.q, inputs.k, inputs.v, inputs.layout)
    assume(KERNELS[target].refusal(inputs.variant.program, problem) is None)
    for seed in range(case.seed, case.seed + (1 if hopper.GPU else seeds)):
        if target == "sm90":
            hopper.check(case, seed, num_sms=1 + seed % 3)
            continue
        with emulator(target, seed, detect="all", num_sms=1 + seed % 3, record=False):
            results = run(by_backend("emulator"), inputs, backward=False)
            exp = default_exp("emulator", inputs)
        assert_close_to_oracle(results, inputs, context=str(case), exp=exp)


@on_both()
@settings(max_examples=2, phases=NO_SHRINKING)
@given(case=cases())
def test_random_variants_on_random_problems(target: str, case: Case) -> None:
    check(target, case)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(16))
@on_both()
@settings(max_examples=13, phases=NO_SHRINKING)
@given(case=cases())
def test_many_random_variants_on_random_problems(target: str, case: Case, part: int) -> None:
    check(target, case, seeds=3)
