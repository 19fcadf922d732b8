"""A report on backward kernels as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fa4core.compile.sass import PIPES
from fa4core.console import facts, grid, section
from fa4core.report.backward import BARRIERS, Kernel, Static
from fa4core.report.blocks import ROLES, Moved
from fa4core.report.check import Line
from fa4core.report.show import checks_table, number

Kernels = Sequence[Kernel]

_MOVED = {
    "a": "operands A of products",
    "b": "operands B of products",
    "stored": "stored by warps: dS, dQ",
    "added": "read to be added to dQ in global memory",
    "read": "read by warps: LSE, delta; dS for the other CTA",
    "brought": "brought by bulk copies: Q, dO; dS of the other",
}
_PAPER = {"products": "mma", "shared memory": "smem", "exponentials": "exp"}


def renderables(
    kernels: Kernels, missing: str, checks: Sequence[Line] = ()
) -> Iterator[RenderableType]:
    """The report, section by section."""
    yield from section("Resources", _resources(kernels))
    for role in ROLES:
        if any(role in k.block.roles for k in kernels):
            title = f"{role}: instructions of a warp for a block of {_size(kernels)}, as executed"
            yield from section(title, _role(kernels, role))
    title = f"Bytes through a CTA's shared memory for a block of {_size(kernels)}, as executed"
    yield from section(title, _moved(kernels))
    title = f"Modelled cycles of an SM for a block of {_size(kernels)}, from these counts"
    yield from section(title, _cycles(kernels))
    if missing:
        yield from section("Not here", facts([("", missing)]))
    if checks:
        yield from section("Check", checks_table(checks))


def _head(kernel: Kernel) -> str:
    return kernel.title.replace(", ", "\n")


def _size(kernels: Kernels) -> str:
    return f"{kernels[0].queries} queries and {kernels[0].keys} keys"


def _resources(kernels: Kernels) -> Table:
    table = grid("", *map(_head, kernels))
    rows: list[tuple[str, Callable[[Static], int | None]]] = [
        ("registers of a thread at launch", lambda s: s.registers),
        ("stack and local memory, bytes", lambda s: s.stack + s.local),
        ("spills (loads and stores)", lambda s: s.spills),
        ("shared memory of a CTA, bytes", lambda s: s.smem_bytes),
        ("tensor memory, columns", lambda s: s.tmem_columns),
        ("instructions", lambda s: s.instructions),
        *((f"{opcode} instructions", lambda s, o=opcode: s.barriers[o]) for opcode in BARRIERS),
    ]
    for name, value in rows:
        table.add_row(Text(name, "dim"), *(number(value(k.main)) for k in kernels))
    names = list(dict.fromkeys(s.name for k in kernels for s in k.others))
    for name in names:
        of = [next((s for s in k.others if s.name == name), None) for k in kernels]
        for what, value in rows[:4]:
            if what.startswith(("registers", "spills", "stack")):
                cells = [number(None if s is None else value(s)) for s in of]
                table.add_row(Text(f"{name} the main kernel: {what}", "dim"), *cells)
    return table


def _role(kernels: Kernels, role: str) -> Table:
    table = grid("", *map(_head, kernels))
    found = [k.block.roles.get(role) for k in kernels]
    rows: list[tuple[str, list[float | None]]] = [
        ("warps", [None if r is None else r.warps for r in found]),
        *((pipe, [None if r is None else r.pipes[pipe] for r in found]) for pipe in PIPES),
        ("all", [None if r is None else r.instructions for r in found]),
        ("barrier waits", [None if r is None else r.waits for r in found]),
        ("barrier arrivals", [None if r is None else r.arrivals for r in found]),
    ]
    for name, values in rows:
        if any(values):
            style = "bold" if name == "all" else "dim"
            table.add_row(Text(name, style), *map(number, values))
    return table


def _moved(kernels: Kernels) -> Table:
    table = grid("", *map(_head, kernels))
    for field in attrs.fields(Moved):
        values = [getattr(k.block.smem, field.name) for k in kernels]
        table.add_row(Text(_MOVED[field.name], "dim"), *map(number, values))
    table.add_row(Text("all", "bold"), *(number(k.block.smem.all) for k in kernels))
    return table


def _cycles(kernels: Kernels) -> Table:
    table = grid("", *(cell for k in kernels for cell in (f"{_head(k)}\npaper", "\n\ncounted")))
    for unit in kernels[0].cycles:
        cells = []
        for k in kernels:
            paper = getattr(k.paper, _PAPER[unit]) if unit in _PAPER else None
            cells += [number(paper), number(k.cycles[unit])]
        table.add_row(Text(unit, "dim"), *cells)
    return table
