"""Cycles of the cells that the benchmark of speed measured, counted by a profiler on a GPU.

    ncu --clock-control none --cache-control none --kernel-name "regex:forward_kernel|flash_attn" \
        --metrics sm__cycles_elapsed.max,gpu__time_duration.sum --csv --page raw \
        --log-file ncu.csv python benchmarks/cycles.py run benchmarks/results/forward_h200.json
    python benchmarks/cycles.py collect benchmarks/results/forward_h200.json ncu.csv --out FILE

`run` calls each kernel of each cell once, and is what the profiler watches; `collect` writes a JSON
file of the same cells with `cycles` and the clock of that launch. The timing model gives cycles,
too; they don't depend on the clock, as times do.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

NAMES = {"ours": "forward_kernel", "FA4": "flash_attn"}  # of kernels: what is in them
CYCLES, SECONDS = "sm__cycles_elapsed.max", "gpu__time_duration.sum"
UNITS = {"ns": 1e-9, "us": 1e-6, "usecond": 1e-6, "nsecond": 1e-9, "ms": 1e-3, "msecond": 1e-3}

Cells = list[dict[str, Any]]


def wanted(path: Path, only: str | None = None) -> Cells:
    """Cells that both kernels can do."""
    cells = json.loads(path.read_text())["cells"]
    found = [c for c in cells if NAMES.keys() <= c["results"].keys()]
    return [c for c in found if only is None or str(c["seqlen"]) == only]


@click.group()
def main() -> None:
    """Count cycles."""


@main.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--only", help="Cells of this length alone.")
def run(path: Path, only: str | None) -> None:
    """Call every kernel once."""
    import torch
    from measured_cells import Cell, meaning
    from peers import CONTENDERS

    for measured in wanted(path, only):
        cell = Cell(measured["variant"], measured["head_dim"], measured["seqlen"])
        what, qkv = meaning(cell), cell.inputs()
        for name in NAMES:
            CONTENDERS[name](cell, what, qkv)()
            torch.cuda.synchronize()


@main.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("profile", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
def collect(path: Path, profile: Path, out: Path) -> None:
    """Put what the profiler wrote beside the cells."""
    lines = profile.read_text().splitlines()
    header = next(n for n, line in enumerate(lines) if line.startswith('"ID"'))
    units, *rows = csv.DictReader(lines[header:])
    cells = wanted(path)
    if len(rows) != len(NAMES) * len(cells):
        raise click.ClickException(
            f"{len(rows)} launches in {profile}, {len(cells)} cells of {len(NAMES)} kernels in "
            f"{path}: they are not of one run"
        )
    launches = iter(rows)
    found = []
    for cell in cells:
        results = {}
        for name, part in NAMES.items():
            row = next(launches)
            if part not in row["Kernel Name"]:
                raise click.ClickException(f"{row['Kernel Name']} is not one of {name}")
            cycles = float(row[CYCLES].replace(",", ""))
            seconds = float(row[SECONDS].replace(",", "")) * UNITS[units[SECONDS]]
            results[name] = {"cycles": round(cycles), "ghz": round(cycles / seconds / 1e9, 3)}
        found.append({k: cell[k] for k in ("variant", "head_dim", "seqlen")} | {"results": results})
    out.write_text(json.dumps({"profiler": "ncu", "cells": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
