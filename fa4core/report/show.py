"""A static report as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fa4core.compile.sass import PIPES
from fa4core.console import grid, section
from fa4core.report.check import Line
from fa4core.report.figures import Figures
from fa4core.report.kernel import Kernel
from fa4core.report.model import UNITS, Cycles
from fa4core.sm100.forward.spec import Spec

Kernels = Sequence[Kernel]  # ours, and a peer's

_WAYS = {
    "softmax": ("a 128 x 128 tile", "unmasked", "masked"),
    "correction": ("a 128 x 128 tile", "O as it is", "O rescaled"),
    "mma": ("a key block of the CTA", ""),
    "load": ("a key block of the CTA", ""),
}


def renderables(
    kernels: Kernels, spec: Spec, roofline: dict[str, Cycles], checks: Sequence[Line] = ()
) -> Iterator[RenderableType]:
    """The report, section by section."""
    yield from section("Resources", _resources(kernels, spec))
    for role, (per, *ways) in _WAYS.items():
        title = f"{role}: instructions of a warp for {per}, counted in the machine code"
        yield from section(title, _role(kernels, role, ways))
    title = f"Modelled cycles of an SM for a key block of {spec.tiles} x 128 queries"
    yield from section(title, _cycles(kernels, roofline))
    if checks:
        yield from section("Check", checks_table(checks))


def _titles(kernels: Kernels, ways: Sequence[str], before: Sequence[str] = ()) -> list[str]:
    """Columns: for every way what comes before, each kernel, the ratio; headed by the way."""
    ratio = ["ratio"] if len(kernels) > 1 else []
    columns = [*before, *(k.title for k in kernels), *ratio]
    heads = [way if n == 0 else "" for way in ways for n in range(len(columns))]
    names = columns * len(ways)
    if not any(ways):
        return names
    return [f"{head}\n{name}" for head, name in zip(heads, names, strict=True)]


def _row(values: Sequence[float | None]) -> list[str]:
    """Ours, the peer's, and their ratio."""
    cells = [number(v) for v in values]
    if len(values) > 1:
        ours, peer = values
        cells.append("" if ours is None or not peer else f"{ours / peer:.2f}")
    return cells


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def _resources(kernels: Kernels, spec: Spec) -> Table:
    table = grid("", *_titles(kernels, [""]))
    rows: list[tuple[str, list[float | None]]] = [
        ("registers of a thread at launch", [k.registers for k in kernels]),
        ("stack and local memory, bytes", [k.stack + k.local for k in kernels]),
        ("spills (loads and stores)", [k.spills for k in kernels]),
        ("shared memory, bytes", [k.smem_bytes for k in kernels]),
        ("tensor memory, columns", [k.tmem_columns for k in kernels]),
        ("instructions", [k.instructions for k in kernels]),
        ("compile time, seconds", [k.compile_seconds for k in kernels]),
    ]
    for name, values in rows:
        table.add_row(Text(name, "dim"), *_row(values))
    for r in spec.pipeline.roles:
        table.add_row(Text(f"registers declared for {r.name}", "dim"), str(r.registers))
    return table


def _role(kernels: Kernels, role: str, ways: Sequence[str]) -> Table:
    keys = [("shortest", "longest")[n] for n in range(len(ways))]
    table = grid("", *_titles(kernels, ways))

    def add(name: str, value: Callable[[Figures], float], style: str = "dim") -> None:
        cells: list[str] = []
        for way in keys:
            found = [k.figures[role, way] if k.has_way(role, way) else None for k in kernels]
            cells += _row([None if f is None else value(f) for f in found])
        if any(c not in ("0", "-", "") for c in cells):
            table.add_row(Text(name, style), *cells)

    for pipe in PIPES:
        add(pipe, lambda f, pipe=pipe: f.pipes[pipe])  # type: ignore[misc]
    add("all", lambda f: f.instructions, "bold")
    add("MUFU.EX2", lambda f: f.count("MUFU.EX2"))
    add("barrier waits", lambda f: f.waits)
    add("barrier arrivals", lambda f: f.arrivals)
    return table


def _cycles(kernels: Kernels, roofline: dict[str, Cycles]) -> Table:
    table = grid("", *_titles(kernels, list(roofline), ["paper"]))
    for unit in UNITS:
        cells: list[str] = []
        for kind, paper in roofline.items():
            found = [paper, *(k.cycles[kind] for k in kernels)]
            cells += [_bracketed(cycles, unit) for cycles in found]
            cells += _row([k.cycles[kind].units[unit] for k in kernels])[len(kernels) :]
        table.add_row(Text(unit, "dim"), *cells)
    return table


def _bracketed(cycles: Cycles, unit: str) -> str:
    """The unit that binds is in brackets."""
    value = cycles.units[unit]
    shown = "-" if value is None else f"{value:,.0f}"
    return f"[{shown}]" if unit == cycles.bound else f"{shown} "


def checks_table(checks: Sequence[Line]) -> Table:
    table = grid("", "", "ours", "at most", "", left=2)
    for line in checks:
        verdict = Text("pass", "green") if line.ok else Text("FAIL", "bold red")
        table.add_row(verdict, line.name, number(line.ours), number(line.limit), line.unit)
    return table
