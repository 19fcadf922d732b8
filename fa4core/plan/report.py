"""An `Explanation` as text: rich tables, or the same without colours for `print`.

Used by `explain` (for `str`) and by the command line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fa4core import console
from fa4core.console import facts, section
from fa4core.plan.choose import SHARE
from fa4core.plan.makespan import Estimate, best
from fa4core.plan.tiles import EMPTY, FULL, PARTIAL
from primitives.expr import pretty
from primitives.schedule import Order, Schedule
from primitives.wording import counted

if TYPE_CHECKING:
    from fa4core.plan.explain import Explanation
    from fa4core.plan.paths import Choice

ORDER_TITLES = {
    "in_order": "in order",
    "longest_first": "longest first",
    "shortest_first": "shortest first",
    "batch_sorted": "batch sorted",
}


def plain(explanation: Explanation) -> str:
    """The report as text of at most 100 columns, without colours."""
    return console.plain(*renderables(explanation))


def renderables(explanation: Explanation) -> Iterator[RenderableType]:
    """The report, section by section."""
    yield from section("Variant", _variant(explanation))
    yield from section("Call", _call(explanation))
    yield from section("Tiles", _tiles(explanation))
    if explanation.forward:
        yield from section(
            "Roofline: cycles of an SM for one block; the unit that binds is in brackets",
            _roofline(explanation),
        )
        yield from section("Schedule: modelled forward time", _schedules(explanation))
        yield from section("", _cost(explanation))
    yield from section("Run-time arguments", _arguments(explanation))
    if explanation.warnings:
        yield from section("Warnings", _warnings(explanation))


def _variant(e: Explanation) -> Table:
    v = e.variant
    rows = [("mask", f"{v.mask.name}:  {pretty(v.graph.mask)}")]
    if v.score.name != "identity":
        rows.append(("score mod", f"{v.score.name}:  {pretty(v.graph.score)}"))
    if v.sink is not None:
        rows.append(("sink", f"{v.sink.name}:  {pretty(v.sink.expr)}"))
    if v.blocks is not None:
        rows.append(("block map", f"blocks of {v.blocks.block_q} x {v.blocks.block_k}"))
    exp = e.plan.exp
    share = "all by hardware"
    if exp.fraction:
        share = f"{exp.fraction:.4g} by a polynomial of degree {exp.degree}, the rest by hardware"
    rows.append(("exponentials", share + ("" if v.exp else " (the target's default)")))
    default = "" if v.rescale_threshold is not None else " (the target's default)"
    rows.append(("rescaling", f"when the maximum grows by 2^{e.plan.rescale_threshold:g}{default}"))
    return facts(rows)


def _call(e: Explanation) -> Table:
    p = e.problem
    heads = f"{p.heads_q} heads"
    if p.group > 1:
        heads = f"{p.heads_q} query heads on {p.heads_kv} KV heads"
    dims = f"{p.head_dim}" if p.head_dim == p.head_dim_v else f"{p.head_dim}, {p.head_dim_v}"
    kinds = [
        *(["packed queries"] if p.starts_q is not None else []),
        *(["packed keys"] if p.starts_k is not None else []),
        *([f"pages of {p.page_size} keys"] if p.page_size else []),
    ]
    layout = f", {', '.join(kinds)}" if kinds else ""
    sequences = counted(p.batch, "sequence")
    rows = [
        ("problem", f"{sequences} of {_span(p.seqlens_q)} queries x {_span(p.seqlens_k)} keys"),
        ("", f"{heads}, head dim {dims}, {str(p.dtype).removeprefix('torch.')}{layout}"),
        *_paths(e),
        ("target", f"{e.target.name} ({e.target.title})"),
        ("tiles", f"forward {e.plan.forward_tile}, backward {e.plan.backward_tile}"),
        ("compile key", e.plan.digest),
    ]
    return facts(rows)


def _paths(e: Explanation) -> list[tuple[str, str]]:
    """The path, or that there is none; then the others, each with the first reason against it."""
    reason = _reason(e.chosen)
    path = f"{e.chosen.backend}: {reason}"
    if not e.chosen.ok:
        path = f"none: this call would fail. {e.chosen.backend} refuses it: {reason}"
    rows = [("path", path)]
    for other in e.paths:
        if other.backend != e.chosen.backend:
            why = "possible" if other.ok else _reason(other).partition(";")[0]
            rows.append(("", f"{other.backend}: {why}"))
    if e.chosen.ok and (e.gradients.backend, e.gradients.ok) != (e.chosen.backend, True):
        by = e.gradients.backend if e.gradients.ok else "none"
        rows.append(("gradients", f"{by}: {e.gradients.reason}"))
    return rows


def _reason(choice: Choice) -> str:
    return choice.reason.removeprefix(f"backend={choice.backend!r}: ")


def _span(lengths: tuple[int, ...]) -> str:
    low, high = min(lengths, default=0), max(lengths, default=0)
    return f"{low:,}" if low == high else f"{low:,}..{high:,}"


def _tiles(e: Explanation) -> Table:
    total = max(1, sum(e.tiles.values()))
    rows = [
        (name, f"{e.tiles[kind]:>14,}   {e.tiles[kind] / total:7.2%}   {what}")
        for name, kind, what in (
            ("EMPTY", EMPTY, "skipped"),
            ("PARTIAL", PARTIAL, "computed, the mask applied to every element"),
            ("FULL", FULL, "computed without the mask"),
        )
    ]
    rows.append(("rows with no key", str(e.empty_rows)))
    return facts(rows)


def _roofline(e: Explanation) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("")
    for title in ("MMA", "SMEM", "exp", "FMA", "ALU"):
        table.add_column(title, justify="right")
    for direction, kind, terms in e.roofline:
        cells = []
        for unit in ("mma", "smem", "exp", "fma", "alu"):
            cycles = f"{getattr(terms, unit):,.0f}"
            bound = unit == terms.bound
            cells.append(Text(f"[{cycles}]" if bound else f"{cycles} ", "bold" if bound else ""))
        table.add_row(Text(f"{direction}, {kind}", "dim"), *cells)
    return table


def _schedules(e: Explanation) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("")
    table.add_column("")
    times: dict[tuple[str, str], dict[str, Estimate]] = {}
    for shown in _shown(e):
        s = shown.schedule
        name = s.coordinates if s.num_splits == 1 else f"{s.coordinates} in {s.num_splits}"
        times.setdefault((name, s.source), {})[s.order] = shown
    used = [o for o in get_args(Order) if any(o in row for row in times.values())]
    for order in used:
        table.add_column(ORDER_TITLES[order], justify="right")
    for (coordinates, source), row in times.items():
        cells = []
        for order in used:
            estimate = row.get(order)
            here = estimate is not None and estimate.schedule == e.plan.schedule
            text = "" if estimate is None else duration(estimate.seconds)
            cells.append(Text(f"[{text}]" if here else f"{text} ", "bold" if here else ""))
        table.add_row(Text(coordinates, "dim"), Text(source, "dim"), *cells)
    return table


def _shown(e: Explanation) -> list[Estimate]:
    """The estimates in the table: of the splits only the best number, and the chosen one."""
    split = [x for x in e.forward if x.schedule.num_splits > 1]
    keep = {1, e.plan.schedule.num_splits}
    if split:
        keep.add(best(split).schedule.num_splits)
    return [x for x in e.forward if x.schedule.num_splits in keep]


def _cost(e: Explanation) -> Table:
    rows = []
    if e.best is not None:
        chosen = "asked for" if e.variant.schedule is not None else "chosen"
        rows.append(("forward", f"{_estimate(e.best)}; {_choices(e.best.schedule)} ({chosen})"))
        fastest = best(e.forward)
        if e.variant.schedule is None and fastest.seconds < 0.95 * e.best.seconds:
            text = f"{duration(fastest.seconds)} modelled, {_choices(fastest.schedule)}"
            rows.append(("  quicker", f"{text}; not chosen: {_why_not(fastest, e.best)}"))
    backward = best(e.backward)
    rows.append(("backward", f"{_estimate(backward)}; {_choices(backward.schedule)}"))
    return facts(rows)


def _why_not(quicker: Estimate, chosen: Estimate) -> str:
    """Why the rule of `plan.choose` leaves out what the model finds quicker."""
    there, here = quicker.schedule, chosen.schedule
    if there.num_splits > here.num_splits:
        reason = f"keys are split while each share has {SHARE} blocks and an SM of its own"
    elif (there.coordinates, there.ctas) != (here.coordinates, here.ctas):
        reason = "it would change the kernel from length to length"
    else:
        reason = "the model leaves out the L2 cache"
    return f"{reason} (to take it, set `schedule` of the variant)"


def _estimate(x: Estimate) -> str:
    limit = ", limited by memory bandwidth" if x.memory_bound else ""
    return (
        f"{duration(x.seconds)} modelled, {x.tflops:,.0f} TFLOP/s, SMs busy {x.utilisation:.0%}"
        f"{limit}; {x.tiles:,} work tiles"
    )


def _choices(s: Schedule) -> str:
    splits = f" in {s.num_splits}" if s.num_splits > 1 else ""
    return f"{s.coordinates}{splits}, {s.source}, {s.order}"


def duration(seconds: float) -> str:
    """Three significant digits in the unit that fits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * scale >= 1 or unit == "us":
            value = seconds * scale
            digits = 0 if value >= 100 else 1 if value >= 10 else 2
            return f"{value:.{digits}f} {unit}"
    raise AssertionError


def _arguments(e: Explanation) -> Table:
    return facts(list(e.arguments) or [("", "q, k and v only")])


def _warnings(e: Explanation) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="bold yellow")
    table.add_column(overflow="fold")
    for warning in e.warnings:
        table.add_row("!", Text(warning))
    return table
