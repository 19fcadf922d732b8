"""Passes on a Hopper GPU: ours against FlashAttention-4, FlexAttention and cuDNN.

    python benchmarks/speed.py forward                        # everything
    python benchmarks/speed.py backward --variants causal,full --dims 128 --lengths 8192 --out b

FlashAttention-4's protocol (bf16, 32k tokens, hidden size 2048). The contenders of a cell run
interleaved in one process; a figure is the median over rounds, its spread their 75 % - 25 %. Prints
a table with ratios and writes JSON and a plot. Every result is compared with float32 arithmetic.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from measured_cells import VARIANTS, Cell, meaning  # noqa: E402
from peers import CONTENDERS, LeftOut, backward, error, expected  # noqa: E402
from timing import interleaved  # noqa: E402

from fa4core.plan.plan import plan  # noqa: E402
from fa4core.plan.problem import Problem  # noqa: E402

WORST = 1e-2  # relative error of a bf16 output that is taken for right


def measure(cell: Cell, names: list[str], rounds: int, differentiate: bool) -> dict[str, Any]:
    """Times, TFLOP/s, errors and reasons of absence of one cell's contenders."""
    what, qkv = meaning(cell), cell.inputs(differentiate)
    functions: dict[str, Any] = {}
    errors, absent = {}, {}
    upstream = torch.randn_like(qkv[0], requires_grad=False) if differentiate else None
    wanted = expected(cell, what, qkv, upstream)
    for name in names:
        try:
            functions[name] = CONTENDERS[name](cell, what, qkv)
            if upstream is not None:
                functions[name] = backward(functions[name], qkv, upstream)
            errors[name] = error(functions[name](), wanted, cell)
        except LeftOut as reason:
            absent[name] = str(reason)
        except Exception as failure:  # a peer's failure is a finding, not the end of the run
            absent[name] = f"{type(failure).__name__}: {str(failure)[:200]}"
        if name in absent:
            functions.pop(name, None)
    products = 10 if differentiate else 4
    flops = products * cell.head_dim * _attended(cell, what, qkv)
    times = interleaved(functions, rounds)
    return {
        "variant": cell.variant,
        "head_dim": cell.head_dim,
        "seqlen": cell.seqlen,
        "flops": flops,
        "absent": absent,
        "results": {
            name: {
                "ms": time.median,
                "spread_ms": time.spread,
                "ghz": time.ghz,
                "tflops": flops / time.median / 1e9,
                "error": errors[name],
            }
            for name, time in times.items()
        },
    }


def _attended(cell: Cell, what: Any, qkv: tuple) -> float:
    """Scores that count; for every head and sequence, half of those on the diagonal's tiles."""
    problem = Problem.from_tensors(*qkv, cell.layout())
    return plan(what.ours, problem).attended


def show(title: str, cells: list[dict[str, Any]], names: list[str], console: Console) -> None:
    title = f"{title}, TFLOP/s, {torch.cuda.get_device_name()}"
    table = Table(title=title, title_justify="left")
    for column in ("variant", "d", "length", *names, *(f"/ {n}" for n in names[1:])):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for cell in cells:
        results = cell["results"]
        row = [cell["variant"], str(cell["head_dim"]), str(cell["seqlen"])]
        for name in names:
            r = results.get(name)
            wrong = " WRONG" if r and not r["error"] <= WORST else ""
            row.append(f"{r['tflops']:.0f} ±{r['spread_ms'] / r['ms']:.0%}{wrong}" if r else "-")
        mine = results.get("ours")
        for name in names[1:]:
            both = mine and name in results
            row.append(f"{results[name]['ms'] / mine['ms']:.2f}" if both else "")
        table.add_row(*row)
    console.print(table)
    for name in names[1:]:
        ratios = [
            c["results"][name]["ms"] / c["results"]["ours"]["ms"]
            for c in cells
            if {"ours", name} <= set(c["results"])
        ]
        if ratios:
            mean = torch.tensor(ratios).log().mean().exp().item()
            console.print(f"over {name}: geometric mean {mean:.3f} in {len(ratios)} cells")
    for cell in cells:
        for name, reason in cell["absent"].items():
            if reason not in ("not asked", "has no argument for it"):
                label = f"{cell['variant']} d={cell['head_dim']} {cell['seqlen']}"
                console.print(f"{label}: {name} left out: {reason}")


def draw(cells: list[dict[str, Any]], names: list[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = sorted({(c["variant"], c["head_dim"]) for c in cells}, key=str)
    columns = min(4, len(groups))
    rows = -(-len(groups) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4 * columns, 3 * rows), squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, (variant, head_dim) in zip(axes.flat, groups, strict=False):
        axis.set_axis_on()
        mine = [c for c in cells if (c["variant"], c["head_dim"]) == (variant, head_dim)]
        for name in names:
            points = [
                (c["seqlen"], c["results"][name]["tflops"]) for c in mine if name in c["results"]
            ]
            if points:
                axis.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        axis.set(title=f"{variant}, d={head_dim}", xscale="log", ylim=(0, None))
        axis.set_xticks([c["seqlen"] for c in mine], [f"{c['seqlen'] // 1024}k" for c in mine])
        axis.minorticks_off()
    axes[0, 0].set_ylabel("TFLOP/s")
    axes[0, 0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


@click.command()
@click.argument("which", metavar="PASS", type=click.Choice(["forward", "backward"]))
@click.option("--variants", default=",".join(VARIANTS), help="Comma-separated.")
@click.option("--dims", default="64,128", help="Head dims.")
@click.option("--lengths", default="1024,4096,8192,16384,32768")
@click.option("--contenders", help="Comma-separated, ours first: " + ", ".join(CONTENDERS))
@click.option("--rounds", default=9)
@click.option("--out", help="Files OUT.json and OUT.png; by default the name of the pass.")
def main(
    which: str,
    variants: str,
    dims: str,
    lengths: str,
    contenders: str | None,
    rounds: int,
    out: str | None,
) -> None:
    """Measure, print and save; PASS is forward or backward."""
    out = out or which
    known = [n for n in CONTENDERS if which == "backward" or "deterministic" not in n]
    names = contenders.split(",") if contenders else known
    done = []
    for variant in variants.split(","):
        for d in map(int, dims.split(",")):
            for seqlen in map(int, lengths.split(",")):
                cell = Cell(variant, d, seqlen)
                done.append(measure(cell, names, rounds, which == "backward"))
                print(
                    cell,
                    {n: round(r["tflops"]) for n, r in done[-1]["results"].items()},
                    flush=True,
                )
    show(which, done, names, Console(width=160))
    about = {
        "pass": which,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "contenders": names,
        "rounds": rounds,
    }
    Path(f"{out}.json").write_text(json.dumps({"about": about, "cells": done}, indent=1))
    draw(done, names, Path(f"{out}.png"))


if __name__ == "__main__":
    main()
