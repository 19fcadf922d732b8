"""Modelled time of the Blackwell forward against FlashAttention-4's, cell by cell.

    python benchmarks/sm100_cells.py
    python benchmarks/sm100_cells.py --kernels "ours 1,ours 2" --lengths 1024,8192,32768
    python benchmarks/sm100_cells.py --variants causal,softcap,alibi --kernels ours --lengths 8192

FlashAttention-4's protocol (bf16, 32k tokens, hidden size 2048). "ours" and "fa4" have the CTAs
that a call gets, with a number behind them so many for a work tile; "fa4 best" is the quicker one.
Nothing is measured: `docs/timing.md` says what the model is. Every figure is a mean over seeds with
its range. Needs nvdisasm, for fa4 the `peers` extra, and no GPU; 20 minutes on two cores.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from measured_cells import Cell  # noqa: E402
from models import Models  # noqa: E402

from fa4core.timing.problem import Modelled  # noqa: E402


def row(cell: Cell, found: dict[str, Modelled]) -> str:
    """A line of the table: TFLOP/s, and the first kernel's time as a share of the others'."""
    cells = [cell.variant, str(cell.head_dim), str(cell.seqlen)]
    for m in found.values():
        t = m.tflops
        cells.append(f"{t.mean:.0f}, {t.low:.0f} to {t.high:.0f}")
    first, *others = found.values()
    cells += [f"{first.seconds.mean / m.seconds.mean:.2f}" for m in others]
    return f"| {' | '.join(cells)} |"


def as_json(cell: Cell, found: dict[str, Modelled]) -> dict[str, Any]:
    names = ("block_cycles", "tile_cycles", "setup_cycles", "seconds", "tflops")
    return {
        "variant": cell.variant,
        "head_dim": cell.head_dim,
        "seqlen": cell.seqlen,
        "modelled": {
            kernel: {"ctas": m.ctas} | {n: list(getattr(m, n).values) for n in names}
            for kernel, m in found.items()
        },
    }


def table(cells: list[Cell], names: list[str], models: Models) -> list[dict[str, Any]]:
    """Prints it, and gives the same as values."""
    done = []
    ratios = [f"{names[0]} / {n}, time" for n in names[1:]]
    print(f"| variant | head dim | length | {' | '.join([*names, *ratios])} |")
    print("|---" * (3 + len(names) + len(ratios)) + "|")
    for cell in cells:
        found = {name: models.of(name, cell) for name in names}
        print(row(cell, found), flush=True)
        done.append(as_json(cell, found))
    return done


@click.command()
@click.option("--variants", default="full,causal,window 1024,window 128", help="Comma-separated.")
@click.option("--dims", default="64,128", help="Head dims.")
@click.option("--lengths", default="1024,2048,4096,8192,16384,32768")
@click.option("--kernels", default="ours,fa4 best", help="Of ours and fa4, as above.")
@click.option("--target", default="sm100", type=click.Choice(["sm100", "sm103"]))
@click.option("--seeds", default=3, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="A JSON file.")
def main(
    variants: str, dims: str, lengths: str, kernels: str, target: str, seeds: int, out: Path | None
) -> None:
    """Print a table, and write a file if asked."""
    cells = [
        Cell(variant, d, seqlen)
        for variant in variants.split(",")
        for d in map(int, dims.split(","))
        for seqlen in map(int, lengths.split(","))
    ]
    done = table(cells, kernels.split(","), Models(target, seeds))
    if out is not None:
        out.write_text(json.dumps({"target": target, "seeds": seeds, "cells": done}, indent=1))


if __name__ == "__main__":
    main()
