"""Draws what ran when in one emulated CTA; needs matplotlib (the ``plot`` extra).

The unit of time is a step of the emulator's scheduler, not a clock cycle: it shows order, overlap
and waiting under one seed, not speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fa4core.emulator.launch import Event, Statistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "run": "tab:blue",
    "wait": "lightgrey",
    "load": "tab:green",
    "store": "tab:orange",
    "mma": "tab:red",
}


def lanes(events: tuple[Event, ...], cta: int) -> dict[str, list[Event]]:
    """Events of one CTA by lane: warps in order, then units."""
    names = {event.lane for event in events if event.cta == cta}
    warps = sorted((n for n in names if n.startswith("warp ")), key=lambda n: int(n.split()[1]))
    ordered = warps + sorted(names.difference(warps))
    return {n: [e for e in events if e.cta == cta and e.lane == n] for n in ordered}


def draw(statistics: Statistics, cta: int = 0) -> Figure:
    """A figure with a row for each warp and unit of a CTA (its linear index in the grid).

    The launch must have run inside ``emulator(..., timeline=True)``.
    """
    if not statistics.timeline:
        raise ValueError("there is no timeline: open the emulator with timeline=True")
    title = f"{statistics.name}, CTA {cta}, seed {statistics.seed}"
    return draw_events(statistics.timeline, cta, title, "scheduler step")


def draw_events(
    events: tuple[Event, ...],
    cta: int,
    title: str,
    unit: str,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """The same for any events; `unit` is what their times count, `limits` what is shown of it."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = lanes(events, cta)
    figure = Figure(figsize=(12, 0.4 * len(rows) + 1.5), layout="constrained")
    axes = figure.add_subplot()
    for height, row in enumerate(rows.values()):
        for event in row:
            span = [(event.start, max(event.stop - event.start, 1))]
            axes.broken_barh(span, (height - 0.4, 0.8), facecolors=COLOURS[event.kind])
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title)
    if limits is not None:
        axes.set_xlim(*limits)
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure
