"""Declarations: derived arrival counts, placement, and refusal of what does not fit."""

from __future__ import annotations

import pytest

from fa4core.console import plain
from fa4core.pipeline.declare import DoesNotFit, How, Limits, Pipeline, Region, Role, Signal
from fa4core.pipeline.layout import place
from fa4core.pipeline.show import renderables

ROLES = (Role("work", 0, 4, copies=2), Role("issue", 8, 1, registers=48))


def pipeline(*signals: Signal, **rest) -> Pipeline:
    return Pipeline(ROLES, signals, **rest)


@pytest.mark.parametrize(
    "how, count", [(How.TMA, 1), (How.COMMIT, 1), (How.WARPS, 4), (How.THREADS, 128), (How.COPY, 4)]
)
def test_arrival_counts_follow_from_the_arrivals(how: How, count: int) -> None:
    signal = Signal("x", (("work", how),), "issue", copies=2)
    assert pipeline(signal).count(signal) == count


def test_a_merged_signal_counts_all_of_them() -> None:
    signal = Signal("x", (("work", How.WARPS), ("issue", How.COMMIT)), "issue", copies=2)
    assert pipeline(signal).count(signal) == 5


def test_barriers_lie_one_after_the_other() -> None:
    a = Signal("a", (("issue", How.TMA),), "issue", stages=3)
    b = Signal("b", (("work", How.WARPS),), "issue", copies=2)
    declared = pipeline(a, b)
    assert (declared.barrier(a), declared.barrier(b), declared.barriers) == (0, 3, 5)


def test_an_undeclared_arrival_is_refused() -> None:
    signal = Signal("x", (("work", How.WARPS),), "issue")
    with pytest.raises(ValueError, match="declare it there"):
        signal.how("issue")


def test_too_many_registers_are_refused() -> None:
    with pytest.raises(DoesNotFit, match="registers: 7"):
        Pipeline((Role("all", 0, 16, registers=144),), ())


def test_roles_leave_no_gap() -> None:
    with pytest.raises(ValueError, match="starts at warp 5"):
        Pipeline((Role("a", 0, 4), Role("b", 5, 1)), ())


def test_copies_must_agree() -> None:
    with pytest.raises(ValueError, match="3 copies"):
        pipeline(Signal("x", (("work", How.WARPS),), "issue", copies=3))


def test_aliases_lie_inside_their_hosts() -> None:
    regions = (
        Region("s", 128, stages=2),
        Region("p", 64, stages=2, inside="s", offset=64),
        Region("o", 128, stages=2),
    )
    placed = place(regions, 512, "columns")
    assert [placed["p"].at(i) for i in range(2)] == [64, 192]
    assert placed["o"].end == 512
    with pytest.raises(DoesNotFit, match="inside s"):
        place((regions[0], Region("p", 65, stages=2, inside="s", offset=64)), 512, "columns")
    with pytest.raises(DoesNotFit, match="513 columns"):
        place((*regions, Region("more", 1)), 512, "columns")


def test_stages_in_one_stage_of_the_host_are_as_far_apart_as_is_said() -> None:
    regions = Region("s", 128), Region("p", 32, stages=2, inside="s", stride=96)
    assert [place(regions, 512, "columns")["p"].at(i) for i in range(2)] == [0, 96]
    with pytest.raises(DoesNotFit, match="inside s"):
        place((regions[0], Region("p", 33, stages=2, inside="s", stride=96)), 512, "columns")


def test_alignment_and_printout() -> None:
    signal = Signal("x", (("work", How.WARPS), ("issue", How.COMMIT)), "issue", copies=2)
    declared = pipeline(
        signal,
        smem=(Region("a", 10), Region("b", 100, stages=2, align=64)),
        limits=Limits(smem_bytes=320),
    )
    text = plain(*renderables(declared))
    assert "work (warps), issue (commit)" in text
    assert "of 320 bytes" in text
    assert place(declared.smem, 320, "bytes")["b"].offset == 64
