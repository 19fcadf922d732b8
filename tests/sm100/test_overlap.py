"""One work tile's end overlaps the next one's start: what still runs while a role stands still."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core.pipeline.check import ProtocolError, _Simulation
from fa4core.pipeline.record import Arrive, Touch, Wait
from fa4core.sm100.forward.protocol import programs
from fa4core.sm100.forward.spec import PARTS, Spec

SPEC = Spec("", "bfloat16", 128, 128)
BLOCKS = 2  # of each of two work tiles


def done_without(role: str, end: Callable[[Any], bool]) -> dict[str, list[Any]]:
    """The events that happen if `role` stops before the first event for which `end` holds."""
    recorded = programs(SPEC, (BLOCKS, BLOCKS))
    for i, program in enumerate(recorded):
        if program.name == role:
            stop = next(n for n, event in enumerate(program.events) if end(event))
            # it waits for what never comes
            events = (*program.events[:stop], *[Wait(("o_full", 0, 0), 1)] * 9)
            recorded[i] = attrs.evolve(program, events=events)
    simulation = _Simulation(SPEC.pipeline, recorded)
    with pytest.raises(ProtocolError):
        simulation.run()
    return {p.program.name: list(p.program.events[: p.position]) for p in simulation.processes}


def touched(events: list[Any], name: str, region: str, stage: int) -> int:
    """How many of the events are calls of `name` that touch this stage of this region."""
    return sum(
        isinstance(e, Touch)
        and e.name == name
        and any((a.region, a.stage) == (region, stage) for a in e.accesses)
        for e in events
    )


def finish(t: int) -> Callable[[Any], bool]:
    return lambda event: touched([event], "stage", "o", t) > 0


def test_only_accumulating_waits_for_the_epilogue() -> None:
    """Correction is about to write O of the first work tile, and none of it is written.

    Of the next work tile's P the last part is missing: it waits for room for the row's statistics,
    and the product with V waits for O in any case. The second query tile's softmax waits until
    correction has read its sum, which it does behind O of the first.
    """
    done = done_without("correction", finish(0))
    for t in (0, 1):
        assert touched(done["load"], "load_q", "q", t) == 2
        assert touched(done["mma"], "qk", "s", t) == BLOCKS + 1
        assert touched(done["mma"], "pv", "o", t) == BLOCKS
        parts = touched(done[f"softmax{t}"], "store_p", "p", t)
        assert parts == (PARTS - 1) * (BLOCKS + (t == 0))
    assert sum(touched(done["load"], "load_k", "kv", s) for s in range(SPEC.kv_stages)) == 4


def test_a_query_tile_waits_for_its_own_epilogue_only() -> None:
    """O of the first query tile is written, that of the second is not."""
    done = done_without("correction", finish(1))
    assert touched(done["mma"], "pv", "o", 0) == BLOCKS + 1
    assert touched(done["mma"], "pv", "o", 1) == BLOCKS


def test_scores_of_the_next_work_tile_do_not_wait_for_the_other_query_tile() -> None:
    """The second query tile's last P is late."""
    last = 2 * BLOCKS  # arrivals on p_last and p_ready, the last one of both
    seen = []

    def late(event: Any) -> bool:
        if isinstance(event, Arrive) and event.slot[0] in ("p_ready", "p_last"):
            seen.append(event)
        return len(seen) == last

    done = done_without("softmax1", late)
    assert touched(done["mma"], "qk", "s", 0) == BLOCKS + 1
    assert touched(done["mma"], "pv_last", "o", 1) == BLOCKS - 1


def test_keys_are_loaded_while_queries_are_still_in_use() -> None:
    """The last score of the first query tile is late, so that Q is in use."""
    seen = []

    def late(event: Any) -> bool:
        if isinstance(event, Touch) and event.name == "qk":
            seen.append(event)
        return len(seen) == 2 * BLOCKS

    done = done_without("mma", late)
    assert touched(done["load"], "load_q", "q", 0) == 1
    assert sum(touched(done["load"], "load_k", "kv", s) for s in range(SPEC.kv_stages)) == 3
