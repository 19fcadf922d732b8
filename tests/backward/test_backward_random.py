"""Random variants, problems and layouts from the testing kit, with all their gradients.

Who writes a mask or a score mod writes no backward code: these variants have none. A few by
default; `HYPOTHESIS_PROFILE=sweep pytest -m sweep tests/backward/test_backward_random.py` runs
many, each with several seeds of the emulator.
"""

from __future__ import annotations

import attrs
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from supported import supported

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from emulated_backward import TARGETS, gradients, machine

from fa4core.backends import KERNELS
from fa4core.plan.problem import Problem
from fa4core.testing import Case, LayoutSpec, assert_close_to_oracle
from fa4core.testing.strategies import cases

NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # every example is a compilation


def check(target: str, case: Case, deterministic: bool, seeds: int = 1) -> None:
    case = supported(case)
    if case.layout.kind.startswith("paged"):
        case = attrs.evolve(case, layout=LayoutSpec("varlen_seqused", slack=case.layout.slack))
    inputs = case.inputs()
    problem = Problem.from_tensors(inputs.q, inputs.k, inputs.v, inputs.layout)
    kernels, program = KERNELS[target], inputs.variant.program
    assume(kernels.refusal(program, problem) is None)
    assume(kernels.backward_refusal(program, problem) is None)
    for seed in range(case.seed, case.seed + seeds):
        with machine(target, seed, num_sms=1 + seed % 3):
            results = gradients(inputs, deterministic=deterministic)
        context = f"{target}, deterministic={deterministic}, seed {seed}: {case}"
        assert_close_to_oracle(results, inputs, context=context)


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=2, phases=NO_SHRINKING)
@given(case=cases(), deterministic=st.booleans())
def test_random_variants(target: str, case: Case, deterministic: bool) -> None:
    check(target, case, deterministic)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(16))
@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=13, phases=NO_SHRINKING)
@given(case=cases(), deterministic=st.booleans())
def test_many_random_variants(target: str, case: Case, deterministic: bool, part: int) -> None:
    check(target, case, deterministic, seeds=3)
