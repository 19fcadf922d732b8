"""Work sources: the same results from each, and a protocol that the checker proves."""

from __future__ import annotations

import itertools

import pytest
from seeded import bugs

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core.forward import source
from fa4core.pipeline.check import ProtocolError
from fa4core.sm100.forward.protocol import check_forward, programs
from fa4core.sm100.forward.spec import Spec

DYNAMIC = Spec("", "bfloat16", 128, 128, dynamic=True)
LISTS = ((3, 0, 2), (1, 1, 4), (2, 5, 1))
OF_QUEUE = list(bugs("queue", source.Queue.next))
OF_SCHEDULER = list(bugs("scheduler", source.scheduler))


@pytest.mark.parametrize("first", range(7))
def test_every_short_list_from_the_queue_is_safe(first: int) -> None:
    """All lists of three work tiles with up to six key blocks, one CTA taking all of them."""
    for blocks in itertools.product((first,), range(7), range(7)):
        check_forward(DYNAMIC, blocks)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("tiles", [1, 2])
def test_one_tile_for_each_cta_is_safe(tiles: int, dynamic: bool) -> None:
    """The list that a CTA has where there are as many CTAs as tiles, and the empty one."""
    spec = Spec("", "bfloat16", 128, 128, tiles=tiles, dynamic=dynamic)
    check_forward(spec, ())
    for blocks in range(7):
        check_forward(spec, (blocks,))


def test_long_lists_go_round_the_ring_of_answers() -> None:
    check_forward(DYNAMIC, (1, 0, 0, 2, 0, 1, 3, 0, 0, 0))


def test_every_role_takes_every_answer() -> None:
    for program in programs(DYNAMIC, (1, 0, 2)):
        taken = [e for e in program.events if getattr(e, "name", "") == "take"]
        assert len(taken) == 3, program.name


@pytest.mark.parametrize("bug", OF_SCHEDULER, ids=str)
def test_a_bug_of_the_scheduler_is_found(bug) -> None:
    with pytest.raises(ProtocolError, match=r"scheduler|tile_"):
        for blocks in LISTS:
            check_forward(DYNAMIC, blocks, {"scheduler": bug.function})


@pytest.mark.parametrize("bug", OF_QUEUE, ids=str)
def test_a_bug_of_the_roles_end_is_found(bug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source.Queue, "next", bug.function)
    with pytest.raises(ProtocolError, match=r"tile_|take"):
        for blocks in LISTS:
            check_forward(DYNAMIC, blocks)


def test_there_are_seeded_bugs() -> None:
    assert len(OF_SCHEDULER) == 3
    assert len(OF_QUEUE) == 3
