"""A pipeline as tables: roles, signals with derived counts, memory with offsets and aliases.

Plain Python and rich; `python -m fa4core explain ... --pipeline` prints it.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table

from fa4core.console import facts, grid, section
from fa4core.pipeline.declare import WARP, How, Pipeline, Region
from fa4core.pipeline.layout import place

_REACH = {
    "own": "",
    "leader": " at the first CTA",
    "all": " at all CTAs",
    "peer": " at the other CTA",
}


def renderables(pipeline: Pipeline) -> Iterator[RenderableType]:
    """The declaration, section by section."""
    limits = pipeline.limits
    taken = sum(r.registers * (r.end - r.first) * WARP for r in pipeline.roles)
    each = f", in each of {pipeline.ctas} CTAs" if pipeline.ctas > 1 else ""
    title = f"Roles: {pipeline.threads} threads, {taken:,} of {limits.registers:,} registers{each}"
    yield from section(title, _roles(pipeline))
    yield from section(f"Signals: {pipeline.barriers} mbarriers", _signals(pipeline))
    for title, regions, limit, unit in (
        ("Shared memory", pipeline.smem, limits.smem_bytes, "bytes"),
        ("Tensor memory", pipeline.tmem, limits.tmem_columns, "columns"),
    ):
        top = max((p.end for p in place(regions, limit, unit).values()), default=0)
        yield from section(f"{title}: {top:,} of {limit:,} {unit}", _regions(regions, limit, unit))


def _roles(pipeline: Pipeline) -> Table:
    table = grid("role", "warps", "copies x warps", "registers a thread", left=2)
    for r in pipeline.roles:
        warps = f"{r.first}" if r.end == r.first + 1 else f"{r.first}..{r.end - 1}"
        only = " (first CTA only)" if r.leader and pipeline.ctas > 1 else ""
        table.add_row(r.name + only, warps, f"{r.copies} x {r.warps}", str(r.registers))
    return table


def _signals(pipeline: Pipeline) -> Group:
    table = grid("signal", "arrives (how)", "waits", "tiles x stages", "count", left=3)
    for s in pipeline.signals:
        by = ", ".join(
            f"{role} ({how.name.lower()}{_REACH[pipeline.reach(s, role)]})"
            for role, how in s.arrivals
        )
        waits = ", ".join(s.waiters) + (", first passes" if s.passed else "")
        count = str(pipeline.count(s))
        table.add_row(s.name, by, waits, f"{s.copies} x {s.stages}", count)
    used = {how for s in pipeline.signals for _, how in s.arrivals}
    legend = [(how.name.lower(), how.value) for how in How if how in used]
    return Group(table, "", facts(legend))


def _regions(regions: tuple[Region, ...], limit: int, unit: str) -> Table:
    table = grid("region", "aliases", "offset", "end", f"stages x {unit}", left=2)
    for name, p in place(regions, limit, unit).items():
        r = p.region
        inside = f"{r.inside} + {r.offset}" if r.inside else ""
        table.add_row(name, inside, f"{p.offset:,}", f"{p.end:,}", f"{r.stages} x {r.size:,}")
    return table
