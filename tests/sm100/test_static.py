"""Static quality of the compiled forward kernel; `python -m fa4core report` shows all of it."""

from __future__ import annotations

import functools

import pytest
import torch
from sampled import one_of

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core.compile.tools import ToolMissing, find_tool

try:
    for tool in ("nvdisasm", "cuobjdump"):
        find_tool(tool)
except ToolMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

from fa4core import Variant
from fa4core.plan.problem import Problem
from fa4core.report.cli import Subject
from fa4core.report.kernel import Kernel
from primitives import mask, schedule, score

CAUSAL = mask.causal()
PLAIN = Variant(mask=CAUSAL)
SOFTCAP = Variant(mask=CAUSAL, score=score.softcap(20.0))


@functools.cache
def kernel(variant: Variant, d: int) -> Kernel:
    problem = Problem(1, 2, 2, d, d, (1024,), (1024,), dtype=torch.bfloat16)
    subject = Subject.of(variant, problem, "sm100")
    return subject.examine("ours", subject.compile(), smem_bytes=subject.spec.smem_bytes)


@pytest.fixture(scope="module")
def causal() -> Kernel:
    return kernel(PLAIN, 128)


def test_a_mask_of_intervals_costs_a_bit_test_and_a_select(causal: Kernel) -> None:
    """For 128 scores: as many selects, bits of 8 predicates at a time, little besides.

    The longest way also follows the maximum.
    """
    full, masked = (causal.figures["softmax", way] for way in ("shortest", "longest"))
    assert masked.instructions - full.instructions < 128 + 128 // 8 + 60 + 15


def test_a_row_uses_packed_arithmetic(causal: Kernel) -> None:
    """Scaling of 64 pairs, the polynomials of 8 of them, and the sum of 64."""
    full = causal.figures["softmax", "shortest"]
    assert full.count("FFMA2") == 64 + 8 * 3
    assert full.count("FADD2") <= 64 + 8 * 3
    assert full.count("FMNMX3") >= 60
    assert full.count("F2FP") == 64
    assert full.count("MUFU.EX2") == 128 - 16


def test_a_softcap_is_one_more_operation_of_the_unit_for_most_scores() -> None:
    """Half of the exponentials make room for it: they run on FMA units."""
    full = kernel(SOFTCAP, 128).figures["softmax", "shortest"]
    assert full.count("MUFU.TANH") == 128
    assert full.count("MUFU.EX2") <= 64 + 1


def test_alibi_costs_a_packed_operation_for_two_scores() -> None:
    """On FULL tiles: no conversions, no arithmetic of its own for each score."""
    alibi = Variant(mask=CAUSAL, score=score.alibi(2))
    full = kernel(alibi, 128).figures["softmax", "shortest"]
    assert full.count("I2F") <= 4
    assert full.count("FFMA2") <= 2 * 64 + 16 * 3


@pytest.mark.parametrize(
    ("variant", "d"),
    one_of(
        2,
        [
            (PLAIN, 128),
            (Variant(), 128),
            (Variant(mask=CAUSAL), 256),
            (Variant(mask=CAUSAL), 64),
            (SOFTCAP, 128),
            (Variant(mask=CAUSAL), 192),
            (Variant(mask=CAUSAL, schedule=schedule.Schedule(ctas=2)), 128),
            (Variant(mask=mask.sliding_window(256)), 128),
            (Variant(mask=CAUSAL, schedule=schedule.Schedule(source="persistent")), 128),
        ],
    ),
    ids=["causal", "full", "d256", "d64", "softcap", "d192", "pair", "window", "static"],
)
def test_no_role_keeps_anything_on_the_stack(variant: Variant, d: int) -> None:
    k = kernel(variant, d)
    assert (k.stack, k.local, k.spills) == (0, 0, 0)
