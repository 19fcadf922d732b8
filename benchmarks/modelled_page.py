"""Writes the page of our forward kernel's modelled times on Blackwell.

    python benchmarks/modelled_page.py > docs/modelled.md

Needs the `peers` extra (FlashAttention-4) and nvdisasm; takes ten minutes, no GPU.
"""

from __future__ import annotations

import itertools
import sys
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import full_tiles  # noqa: E402
from measured_cells import Cell  # noqa: E402
from modelled_forward import table  # noqa: E402
from models import Models  # noqa: E402

from fa4core.plan.target import SM100  # noqa: E402

SEEDS = 3
KERNELS = ["ours", "ours 2", "fa4"]
CELLS = [
    Cell(variant, d, seqlen)
    for variant, d, seqlen in itertools.product(
        ("causal", "full", "window 1024", "window 128"), (64, 128), (1024, 8192, 32768)
    )
]
HEADER = """# Modelled forward times on Blackwell

Written by `python benchmarks/modelled_page.py`. Every figure is [modelled](timing.md), none is
measured: bf16, 32768 tokens, hidden size 2048, at {clock} GHz, mean and range of {seeds} seeds.
What a difference means is in [the validation](timing-validation.md).

## Ours beside FlashAttention-4's, and one CTA beside two

TFLOP/s. *ours* is the kernel that a call gets, with one CTA for a work tile; *ours 2* has two
(`Schedule(ctas=2)`), *fa4* is FlashAttention-4 (flash-attn-4 {version}) as its package chooses it,
with two for full attention at head dim 128. The last columns are the share of time that ours takes:
below 1, ours is faster.
"""
CHOICE = """
One CTA is the default: here it is faster than two in {faster} of {count} cells.
"""
FULL = """
## A FULL tile of a masked variant

Cycles of a key block of which nothing is masked, for 256 queries, beside those of the kernel
without a mask (`python benchmarks/full_tiles.py`).
"""


def main() -> None:
    clock = SM100.measured.clock_ghz
    print(HEADER.format(clock=clock, seeds=SEEDS, version=version("flash-attn-4")))
    done = table(CELLS, KERNELS, Models("sm100", SEEDS))
    seconds = [{k: fmean(m["seconds"]) for k, m in cell["modelled"].items()} for cell in done]
    faster = sum(s["ours"] < s["ours 2"] for s in seconds)
    print(CHOICE.format(faster=faster, count=len(done)) + FULL)
    full_tiles.show([64, 128], "sm100", SEEDS)


if __name__ == "__main__":
    main()
