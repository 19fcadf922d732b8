"""Modelled times as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fa4core.console import grid, section
from fa4core.timing.problem import Modelled, Spread
from fa4core.timing.roles import roles_of
from fa4core.timing.spots import spots_of

_UNITS = {
    "tensor": "matrix products",
    "SMEM": "passes through shared memory",
    "MUFU": "exponentials and other functions",
    "FMA": "FP32 lanes",
    "ALU": "integer, comparison, conversion",
    "TMEM": "loads and stores of tensor memory",
    "TMA": "bytes from the L2 cache",
    "issue": "instructions issued",
}


def renderables(kernels: Sequence[Modelled], hot: int = 0) -> Iterator[RenderableType]:
    """The report; everything in it is modelled. hot: how many instructions to list."""
    seeds = len(kernels[0].many)
    clock = kernels[0].clock_ghz
    title = f"Modelled time at {clock:g} GHz: mean of {seeds} seeds and their range"
    yield from section(title, _times(kernels))
    yield from section(
        f"Modelled cycles of each unit of an SM for a {_block(kernels)} block", _busy(kernels)
    )
    for kernel in kernels:
        yield from section(
            f"{kernel.title}: what the cycles of a warp go into, in per cent (modelled)",
            _roles(kernel),
        )
        if hot:
            title = (
                f"{kernel.title}: cycles lost in front of an instruction in a {_block(kernels)} "
                "block (modelled)"
            )
            yield from section(title, _hot(kernel, hot))


def _block(kernels: Sequence[Modelled]) -> str:
    """What a block is of."""
    return "query" if kernels[0].backward else "key"


def _times(kernels: Sequence[Modelled]) -> Table:
    ratio = ["ratio"] if len(kernels) > 1 else []
    table = grid("", *(k.title for k in kernels), *ratio)

    def add(name: str, value: Callable[[Modelled], Spread | float], digits: int) -> None:
        found = [value(k) for k in kernels]
        means = [f.mean if isinstance(f, Spread) else f for f in found]
        cells = [_spread(f, digits) for f in found]
        if len(means) > 1:
            cells.append(f"{means[0] / means[1]:.2f}" if means[1] else "")
        table.add_row(Text(name, "dim"), *cells)

    across, along = "keys" if kernels[0].backward else "queries", _block(kernels)
    add(f"{across} of a work tile", lambda k: k.rows, 0)
    add("CTAs of a work tile", lambda k: k.ctas, 0)
    add(f"cycles of a {along} block of a work tile", lambda k: k.block_cycles, 0)
    add("cycles of a work tile besides", lambda k: k.tile_cycles, 0)
    longest = kernels[0].blocks[1]
    if all(k.blocks[1] == longest for k in kernels):
        add(f"cycles of a work tile of {longest} blocks", lambda k: k.whole_tile, 0)
    add("cycles that a CTA pays once", lambda k: k.setup_cycles, 0)
    add("work tiles", lambda k: len(k.work), 0)
    add(f"{along} blocks", lambda k: float(k.work.blocks.sum()), 0)
    if any(k.around for k in kernels):
        add("microseconds of kernels around it", lambda k: 1e6 * k.around, 1)
    add("microseconds", lambda k: Spread(tuple(1e6 * s for s in k.seconds.values)), 1)
    add("TFLOP/s", lambda k: k.tflops, 0)
    return table


def _spread(value: Spread | float, digits: int) -> str:
    if not isinstance(value, Spread):
        return f"{value:,.{digits}f}"
    mean, low, high = (f"{v:,.{digits}f}" for v in (value.mean, value.low, value.high))
    return mean if low == high else f"{mean} ({low} to {high})"


def _busy(kernels: Sequence[Modelled]) -> Table:
    table = grid("", "", *(c for k in kernels for c in (k.title, "share")), left=2)
    for unit, what in _UNITS.items():
        if not any(k.busy[unit] for k in kernels):  # not every GPU has all
            continue
        cells = []
        for k in kernels:
            cycles = k.busy[unit]
            cells += [f"{cycles:,.0f}", f"{cycles / k.block_cycles.mean:.0%}"]
        table.add_row(Text(unit, "bold"), Text(what, "dim"), *cells)
    return table


def _roles(kernel: Modelled) -> Table:
    table = grid("warps", "for", "issued", "fixed", "queued", "results of", "", "mbarriers, bytes",
                 "", "others", left=2)  # fmt: skip
    for role in roles_of(kernel.program, kernel.many):
        s = role.spent
        table.add_row(
            role.name,
            Text(role.does, "dim"),
            _percent(s["issued"]),
            _percent(s["fixed"]),
            _percent(s["not chosen"] + s["pipe"]),
            " ".join(name for name, _ in role.results[:2]),
            _percent(s["operands"]),
            " ".join(f"+{offset - 1024}: {share:.0%}" for offset, share in role.barriers[:3]),
            _percent(s["mbarrier"]),
            _percent(s["barrier"]),
        )
    return table


def _hot(kernel: Modelled, most: int) -> Table:
    table = grid("instruction", "source", "for", "address", "cycles", left=3)
    for spot in spots_of(kernel, most):
        text = spot.text if len(spot.text) <= 46 else spot.text[:45] + "…"
        cycles = f"{spot.cycles:,.0f}"
        table.add_row(text, Text(spot.source, "dim"), spot.reason, f"{spot.address:#x}", cycles)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.0f}"
