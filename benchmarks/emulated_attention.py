"""How slow attention is in the emulator: a causal call of one head, forward and backward.

    python benchmarks/emulated_attention.py [--seqlen 1024] [--target sm90]

Seconds of CPU time of one process, with all detectors on: of a first call, which compiles its
kernels unless the disk cache has them, and of the same call again.
"""

from __future__ import annotations

import time

import click
import torch
from rich.console import Console
from rich.table import Table

from fa4core import Variant, attention
from fa4core.emulator.session import emulator
from primitives import mask

CAUSAL = Variant(mask=mask.causal())


def seconds(target: str, seqlen: int, head_dim: int, calls: int = 2) -> list[tuple[float, float]]:
    """CPU seconds of the forward and of the backward pass of each call."""
    shape = (1, seqlen, 1, head_dim)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    found = []
    with emulator(target, record=False):
        for _ in range(calls):
            start = time.process_time()
            out = attention(q, k, v, CAUSAL, backend="emulator")
            middle = time.process_time()
            out.sum().backward()
            found.append((middle - start, time.process_time() - middle))
    return found


@click.command()
@click.option("--seqlen", default=1024)
@click.option("--target", "targets", multiple=True, default=("sm100", "sm90"))
def main(seqlen: int, targets: tuple[str, ...]) -> None:
    table = Table("target", "head dim", "first call", "again", title="forward + backward, CPU s")
    for target in targets:
        for head_dim in (64, 128):
            calls = seconds(target, seqlen, head_dim)
            shown = (f"{forward:.2f} + {backward:.2f}" for forward, backward in calls)
            table.add_row(target, str(head_dim), *shown)
    Console().print(table)


if __name__ == "__main__":
    main()
