"""Random variants, shapes and layouts from the testing kit, through the emulator.

A few by default; `HYPOTHESIS_PROFILE=sweep pytest -m sweep tests/sm100/test_random.py` runs 200,
each with several seeds of the emulator, that is, orders in which asynchronous work takes effect.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from supported import supported

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core.emulator.session import emulator
from fa4core.testing import Case, assert_close_to_oracle, by_backend, default_exp, run
from fa4core.testing.strategies import cases

NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # every example is a compilation


def check(case: Case, seeds: int = 1) -> None:
    case = supported(case)
    inputs = case.inputs()
    for seed in range(case.seed, case.seed + seeds):
        with emulator(target="sm100", seed=seed, detect="all", num_sms=1 + seed % 3, record=False):
            results = run(by_backend("emulator"), inputs, backward=False)
            exp = default_exp("emulator", inputs)
        assert_close_to_oracle(results, inputs, context=str(case), exp=exp)


@settings(max_examples=3, phases=NO_SHRINKING)
@given(cases())
def test_random_variants_on_random_problems(case: Case) -> None:
    check(case)


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(4))
@settings(max_examples=50, phases=NO_SHRINKING)
@given(case=cases())
def test_many_random_variants_on_random_problems(case: Case, part: int) -> None:
    check(case, seeds=3)
