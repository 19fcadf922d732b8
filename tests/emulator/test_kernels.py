"""Every kernel of the suite gives torch's result, under several orders, with every detector on."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from kernels.case import Case, agree, run
from suite import CASES

SEEDS = range(3)
MANY_SEEDS = range(50)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_result_is_torchs(case: Case):
    for seed in SEEDS:
        session, outputs, expected = run(case, seed)
        assert agree(case, outputs, expected), f"wrong under seed {seed}"
        assert session.statistics[-1].instructions


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_detector_fires_on_correct_kernels(case: Case):
    for seed in MANY_SEEDS:
        _, outputs, expected = run(case, seed)
        assert agree(case, outputs, expected), f"wrong under seed {seed}"


@pytest.mark.parametrize("case", CASES[::7], ids=str)
def test_one_seed_gives_one_result(case: Case):
    """The same seed repeats a run instruction by instruction, at whatever addresses."""
    first, one, _ = run(case, seed=11)
    second, two, _ = run(case, seed=11)
    assert all(a.equal(b) for a, b in zip(one, two, strict=True))
    for a, b in zip(first.statistics, second.statistics, strict=True):
        assert dict(a.instructions) == dict(b.instructions)
        assert dict(a.barrier_waits) == dict(b.barrier_waits)
