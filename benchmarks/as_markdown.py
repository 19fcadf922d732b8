"""A table for the docs from what `speed.py` measured.

python benchmarks/as_markdown.py benchmarks/results/forward_h200.json
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

import click


@click.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@click.option("--against", default="FA4", help="The contender to give ratios to.")
def main(path: Path, against: str) -> None:
    """TFLOP/s of every contender by length, and how many times as fast as another ours is."""
    cells = json.loads(path.read_text())["cells"]
    lengths = sorted({cell["seqlen"] for cell in cells})
    found: dict[tuple[str, int], dict[int, dict]] = defaultdict(dict)
    for cell in cells:
        found[cell["variant"], cell["head_dim"]][cell["seqlen"]] = cell["results"]
    print("| | d | " + " | ".join(f"{n // 1024}k" for n in lengths) + " |")
    print("|---|---|" + "---|" * len(lengths))
    ratios = []
    for (variant, d), by_length in found.items():
        names = list(dict.fromkeys(name for results in by_length.values() for name in results))
        for name in names:
            figures = [by_length.get(n, {}).get(name) for n in lengths]
            row = [f"{f['tflops']:.0f}" if f else "" for f in figures]
            print(f"| {variant}, {name} | {d} | " + " | ".join(row) + " |")
        if against in names:
            row = []
            for n in lengths:
                both = by_length.get(n, {})
                if {"ours", against} <= set(both):
                    ratios.append(both[against]["ms"] / both["ours"]["ms"])
                    row.append(f"**{ratios[-1]:.2f}**")
                else:
                    row.append("")
            print(f"| {variant}, ratio | {d} | " + " | ".join(row) + " |")
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"\nGeometric mean of the {len(ratios)} ratios: {mean:.3f}, least {min(ratios):.2f}.")


if __name__ == "__main__":
    main()
