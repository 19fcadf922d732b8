"""Calls attention kernels once each on a GPU, for a profiler that counts cycles.

    ncu --clock-control none --metrics sm__cycles_elapsed.max,sm__inst_executed_pipe_xu.sum \
        --csv python benchmarks/cycles.py "causal 128 8192" "softcap 64 8192"

The timing model gives cycles, too; they don't depend on the clock, as times do.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from measured_cells import Cell, meaning  # noqa: E402
from peers import CONTENDERS, LeftOut  # noqa: E402


def main() -> None:
    for text in sys.argv[1:]:
        variant, head_dim, seqlen = text.rsplit(" ", 2)
        cell = Cell(variant, int(head_dim), int(seqlen))
        what, qkv = meaning(cell), cell.inputs()
        for name in ("ours", "FA4"):
            try:
                CONTENDERS[name](cell, what, qkv)()
            except LeftOut as reason:
                print(f"{cell}: {name} left out: {reason}")
            torch.cuda.synchronize()


if __name__ == "__main__":
    main()
