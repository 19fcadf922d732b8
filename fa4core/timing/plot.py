"""Draws what worked when in a replayed CTA; needs matplotlib (the ``plot`` extra)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa4core.emulator.launch import Event
from fa4core.emulator.timeline import draw_events
from fa4core.plan.target import target as planned
from fa4core.timing.parameters import Parameters
from fa4core.timing.problem import Modelled
from fa4core.timing.replay import replay

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LANES = {-1: "mma", -2: "tma"}
_KINDS = ("mma", "load", "store", "wait")


def draw(kernel: Modelled, target: str, blocks: int = 5) -> Figure:
    """The middle of a work tile, `blocks` key blocks long: tensor core, bulk copies, and when each
    warp waits at a barrier. Modelled, under one seed."""
    rates = planned(target).measured
    found = replay(kernel.program, rates, Parameters.of(rates), seed=0, spans=True)
    half = blocks * kernel.block_cycles.mean / 2
    begin, end = found.cycles / 2 - half, found.cycles / 2 + half
    events = tuple(
        Event(cta, _LANES.get(lane, f"warp {lane}"), _KINDS[kind], start, stop)
        for cta, lane, kind, start, stop in found.spans
        if cta == 0 and stop > begin and start < end
    )
    title = f"{kernel.title}, {blocks} key blocks of a work tile (modelled)"
    return draw_events(events, 0, title, "clock cycle", (begin, end))
