"""Runs every cell of the composition table and prints it as a page of the docs.

    python tests/composition/table.py > docs/composition.md

or for Hopper, with `sm90` behind it. Half an hour on two cores when nothing is in the disk cache:
most cells have kernels of their own.
"""

from __future__ import annotations

import itertools
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch
from cells import Cell, execute
from features import FEATURES
from rich.console import Console
from rich.progress import track

INTRO = """\
# Composition

Every primitive with every other, and with itself: each cell is a forward kernel for {title} that
was compiled and run by the emulator with all of its detectors on, and whose output, LSE and row
maximum were compared with the float64 oracle. A page written by a command, never by hand:

```text
python tests/composition/table.py{argument} > docs/composition{suffix}.md
```

✓ ran and was right. · the two are alternatives: both choose the same thing (two layouts, two
dtypes). A number is a combination that is refused before anything is compiled, with the reason
below.
"""


def _run(target: str, pair: tuple[int, int]) -> Cell | str:
    """The cell of two features, or what went wrong."""
    torch.set_num_threads(1)
    a, b = (FEATURES[i] for i in pair)
    try:
        return execute(a, b, target)
    except Exception as error:
        return f"{a.name} with {b.name}: {type(error).__name__}: {error}"


def page(target: str, cells: dict[tuple[int, int], Cell]) -> str:
    """The page for cells keyed by pairs of indices, the first not above the second."""
    reasons: dict[str, int] = {}
    marks = {"runs": "✓", "alternatives": "·"}
    named = target != "sm100"
    argument, suffix = (f" {target}", f"-{target}") if named else ("", "")
    lines = [INTRO.format(title=target.upper(), argument=argument, suffix=suffix)]
    kinds = [kind for kind, _ in itertools.groupby(FEATURES, lambda f: f.kind)]
    for kind in kinds:
        columns = [i for i, f in enumerate(FEATURES) if f.kind == kind]
        lines += [f"## With {kind}", ""]
        lines.append("| | " + " | ".join(FEATURES[i].name for i in columns) + " |")
        lines.append("|---" * (len(columns) + 1) + "|")
        for i, row in enumerate(FEATURES):
            entries = []
            for j in columns:
                cell = cells[min(i, j), max(i, j)]
                if cell.outcome == "refused":
                    entries.append(f"[{reasons.setdefault(cell.why, len(reasons) + 1)}]")
                else:
                    entries.append(marks[cell.outcome])
            lines.append(f"| {row.name} | " + " | ".join(entries) + " |")
        lines.append("")
    counts = {o: sum(c.outcome == o for c in cells.values()) for o in (*marks, "refused")}
    lines += [
        "## Figures",
        "",
        f"{len(FEATURES)} primitives, {len(cells)} cells: {counts['runs']} ran, "
        f"{counts['alternatives']} are alternatives, {counts['refused']} are refused.",
        "",
    ]
    lines += [f"{number}. {why}" for why, number in reasons.items()]
    return "\n".join(lines).rstrip() + "\n"


def main(target: str = "sm100") -> None:
    pairs = list(itertools.combinations_with_replacement(range(len(FEATURES)), 2))
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        results = pool.map(partial(_run, target), pairs, chunksize=4)
        console = Console(stderr=True)
        cells: dict[tuple[int, int], Cell] = {}
        for pair, cell in zip(
            pairs, track(results, "cells", len(pairs), console=console), strict=True
        ):
            if isinstance(cell, str):
                console.print(cell, markup=False)
            else:
                cells[pair] = cell
    if len(cells) < len(pairs):
        sys.exit(f"{len(pairs) - len(cells)} cells are wrong; no page is written")
    print(page(target, cells), end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
