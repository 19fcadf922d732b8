"""What the order of work tiles gains on a Hopper GPU, beside what the makespan simulation says.

    python benchmarks/schedules.py                 # everything
    python benchmarks/schedules.py --simulate      # without a GPU: what the simulation says

Causal attention, bf16. `LPT` is longest first against in order, as in the FlashAttention-4 paper;
the batches behind it are unequal sequences, sorted by their longest tile against in order. Of each
kind of batch the simulation chooses two out of random ones: where it promises most, and where it
promises nothing. All schedules of a problem run interleaved; a figure is the median over rounds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from timing import interleaved  # noqa: E402

from fa4core import Variant, attention  # noqa: E402
from fa4core.plan.plan import plan  # noqa: E402
from fa4core.plan.problem import Problem  # noqa: E402
from primitives import mask  # noqa: E402
from primitives.schedule import Schedule  # noqa: E402
from primitives.sequence import Layout, varlen  # noqa: E402

HEAD_DIM = 128
DRAWN = 40  # random batches of a kind, of which the simulation chooses
Lengths = list[int]


@attrs.frozen
class Case:
    """Sequences of queries and keys, and the orders to compare: the first is the baseline."""

    name: str
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int
    kv_heads: int
    schedules: tuple[Schedule, ...]

    @property
    def problem(self) -> Problem:
        """Packed, as `inputs` are."""
        starts_q, starts_k = map(_starts, (self.queries, self.keys))
        return Problem(
            len(self.queries), self.heads, self.kv_heads, HEAD_DIM, HEAD_DIM,
            self.queries, self.keys, starts_q=starts_q, starts_k=starts_k,
        )  # fmt: skip

    def inputs(self) -> tuple[tuple[torch.Tensor, ...], Layout]:
        torch.manual_seed(0)
        sizes = (self.queries, self.heads), (self.keys, self.kv_heads), (self.keys, self.kv_heads)
        tensors = tuple(
            torch.randn(sum(n), heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
            for n, heads in sizes
        )
        ends = (torch.tensor((0, *n)).cumsum(0).int().cuda() for n in (self.queries, self.keys))
        return tensors, varlen(*ends)

    def variant(self, schedule: Schedule) -> Variant:
        return Variant(mask=mask.causal(), schedule=schedule)

    def simulated(self) -> list[float]:
        """Milliseconds of each schedule."""
        found = []
        for schedule in self.schedules:
            estimates = plan(self.variant(schedule), self.problem, "sm90").estimates()
            (mine,) = (e for e in estimates if e.schedule == schedule)
            found.append(mine.seconds * 1e3)
        return found

    def measured(self, rounds: int) -> list[float]:
        tensors, layout = self.inputs()
        functions = {
            str(i): _call(tensors, layout, self.variant(schedule))
            for i, schedule in enumerate(self.schedules)
        }
        outs = [function() for function in functions.values()]
        assert all(torch.equal(out, outs[0]) for out in outs), "the order must not change results"
        return [time.median for time in interleaved(functions, rounds).values()]


def _starts(lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(np.cumsum([0, *lengths])[:-1].tolist())


def _call(tensors: tuple, layout: Layout, variant: Variant) -> Callable[[], Any]:
    q, k, v = tensors
    return lambda: attention(q, k, v, variant, layout=layout, backend="sm90")


def lpt() -> list[Case]:
    """Longest first against in order, both in sections, on equal sequences of 32k tokens."""
    orders = tuple(
        attrs.evolve(Schedule(), source=source, order=order)
        for source in ("one_tile", "persistent")
        for order in ("in_order", "longest_first")
    )
    found = []
    for kind, kv_heads in (("MHA", 16), ("MQA 8", 2)):
        for n in (4096, 8192, 16384, 32768):
            lengths = (n,) * (32_768 // n)
            found.append(Case(f"LPT {kind} {n // 1024}k", lengths, lengths, 16, kv_heads, orders))
    return found


IN_ORDER = Schedule(source="one_tile", order="in_order", l2_sections=False)
SORTED = (
    IN_ORDER,
    attrs.evolve(IN_ORDER, order="batch_sorted"),
    attrs.evolve(IN_ORDER, order="longest_first", source="persistent"),
)


def _integers(numbers: np.ndarray) -> Lengths:
    return [int(n) for n in numbers]


def _few_heads(draw: np.random.Generator) -> tuple[Lengths, Lengths, int, int]:
    lengths = _integers(draw.integers(100, 1500, draw.integers(10, 60)))
    lengths.append(int(draw.integers(4096, 24_576)))
    return lengths, lengths, 4, 4


def _decode(draw: np.random.Generator) -> tuple[Lengths, Lengths, int, int]:
    keys = _integers(draw.lognormal(8.0, 1.2, draw.integers(20, 200)) + 16)
    return [1] * len(keys), keys, 8, 8


def _mixed(draw: np.random.Generator) -> tuple[Lengths, Lengths, int, int]:
    keys = _integers(draw.lognormal(7.5, 1.0, draw.integers(16, 64)) + 16)
    long = _integers(draw.integers(4096, 16_384, draw.integers(1, 3)))
    return [1] * len(keys) + long, keys + long, 4, 4


def _short(draw: np.random.Generator) -> tuple[Lengths, Lengths, int, int]:
    lengths = _integers(draw.lognormal(6.5, 1.0, draw.integers(4, 24)) + 16)
    return lengths, lengths, 16, 16


KINDS: dict[str, Callable[[np.random.Generator], tuple[Lengths, Lengths, int, int]]] = {
    "few heads": _few_heads,
    "decode-like": _decode,
    "prefill and decode": _mixed,
    "short totals": _short,
}


def unequal() -> list[Case]:
    """Of each kind the batch that sorting helps most, and one that it doesn't, as simulated."""
    chosen = []
    for kind, of in KINDS.items():
        draw = np.random.default_rng(0)
        drawn = []
        for _ in range(DRAWN):
            queries, keys, heads, kv_heads = of(draw)
            name = f"{kind}, {len(keys)} sequences"
            case = Case(name, tuple(queries), tuple(keys), heads, kv_heads, SORTED)
            before, after, _ = case.simulated()
            drawn.append((before / after, case))
        drawn.sort(key=lambda pair: pair[0])
        chosen += [drawn[-1][1], min(drawn, key=lambda pair: abs(pair[0] - 1.0))[1]]
    return chosen


def show(results: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        "problem", "schedule", "simulated ms", "gain", "measured ms", "gain", "of simulated"
    )
    for result in results:
        for i, schedule in enumerate(result["schedules"]):
            said, took = result["simulated"], result["measured"]
            base = i - i % result["every"]
            promised = said[base] / said[i]
            cells = [f"{said[i]:.3f}", f"{promised:.3f}"]
            if took:
                gain = took[base] / took[i]
                cells += [f"{took[i]:.3f}", f"{gain:.3f}", f"{gain / promised:.2f}"]
            table.add_row(result["name"] if i == 0 else "", schedule, *cells)
        table.add_section()
    console.print(table)


@click.command()
@click.option("--simulate", is_flag=True, help="Say what the simulation says, and no more.")
@click.option("--rounds", default=9)
@click.option("--out", type=click.Path(path_type=Path), help="A JSON file.")
def main(simulate: bool, rounds: int, out: Path | None) -> None:
    """Simulate, measure, print and save."""
    results = []
    for case in lpt() + unequal():
        results.append(
            {
                "name": case.name,
                "heads": [case.heads, case.kv_heads],
                "queries": case.queries,
                "keys": case.keys,
                "every": 2 if case.name.startswith("LPT") else len(case.schedules),
                "schedules": [f"{s.source} {s.order}" for s in case.schedules],
                "simulated": case.simulated(),
                "measured": [] if simulate else case.measured(rounds),
            }
        )
    show(results, Console(width=140))
    if out is not None:
        out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
