"""Speed of the emulator on one core: FlashAttention-4's kernels and a plain matrix product.

    python benchmarks/emulator.py [--repeat 3]

Times are of the launches alone (compilation excluded), the best of the repeats; memory is the
process's peak. "tiles" are 128 x 128 blocks of S: the unit of work of an attention kernel.
"""

from __future__ import annotations

import importlib.util
import math
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import click
import torch
from rich.console import Console
from rich.table import Table

from fa4core.emulator.host.facade import cuda_facade
from fa4core.emulator.session import Session, emulator
from fa4core.report.peer import import_fa4

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "emulator"))


@attrs.frozen
class Row:
    """Seconds of one piece of work without and with detectors, and the goals for both."""

    name: str
    plain: float
    checked: float
    instructions: int
    goal_plain: float | None = None
    goal_checked: float | None = None


def best(work: Callable[[Session], float], detect: str, repeat: int) -> tuple[float, int]:
    """Fewest seconds of the launches in `work`, and their warp instructions."""
    times, count = [], 0
    for seed in range(repeat):
        with (
            emulator("sm100", seed=seed, detect=detect, record=False) as session,
            cuda_facade(session.target, session.num_sms),
        ):
            first = int(work(session))
        launches = session.statistics[first:]
        times.append(sum(launch.seconds for launch in launches))
        count = sum(sum(launch.instructions.values()) for launch in launches)
    return min(times), count


def measure(
    name: str,
    work: Callable[[Session], int],
    repeat: int,
    goals: tuple[float | None, float | None] = (None, None),
) -> Row:
    plain, count = best(work, "none", repeat)
    checked, _ = best(work, "all", repeat)
    return Row(name, plain, checked, count, *goals)


def attention_rows(repeat: int) -> list[Row]:
    """FA4, 1024 x 1024, d = 128, two heads: 128 tiles."""
    interface = import_fa4()

    def make() -> list[torch.Tensor]:
        return [torch.randn(1, 1024, 2, 128).bfloat16().requires_grad_() for _ in "qkv"]

    def forward(causal: bool) -> Callable[[Session], int]:
        def work(session: Session) -> int:
            interface.flash_attn_func(*make(), causal=causal)
            return 0

        return work

    def backward(session: Session) -> int:
        inputs = make()
        out, _ = interface.flash_attn_func(*inputs, return_lse=True)
        first = len(session.launches)
        torch.autograd.grad(out, inputs, torch.randn_like(out))
        return first

    return [
        measure("FA4 forward, full, 128 tiles", forward(False), repeat, (0.4, 0.8)),
        measure("FA4 forward, causal, 72 tiles", forward(True), repeat),
        measure("FA4 backward (all its kernels), full, 128 tiles", backward, repeat, (1.0, 2.0)),
    ]


def product_row(repeat: int) -> Row:
    """512 x 512 x 512 in bf16 by the suite's one-CTA kernel."""
    from cutlass import cute
    from kernels import gemm_sm100
    from kernels.case import view

    a, b = (torch.randn(512, 512).bfloat16() for _ in "ab")
    compiled: list[Callable[..., object]] = []

    def work(session: Session) -> int:
        c = torch.empty(512, 512)
        tensors = [view(x) for x in (a, b, c)]
        if not compiled:
            compiled.append(cute.compile(gemm_sm100.gemm, *tensors, (128, 128, 64), 3))
        compiled[0](*tensors)
        return 0

    return measure("matrix product 512^3, bf16", work, repeat)


@click.command()
@click.option("--repeat", default=3, show_default=True)
def main(repeat: int) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rows = [product_row(repeat)]
    if importlib.util.find_spec("flash_attn") is not None:
        rows += attention_rows(repeat)
    table = Table("work", "no detector", "all detectors", "goals", "warp instructions / s")
    for row in rows:
        goals = " / ".join(f"{goal} s" for goal in (row.goal_plain, row.goal_checked) if goal)
        rate = row.instructions / row.plain if row.plain else math.nan
        table.add_row(
            row.name, f"{row.plain:.3f} s", f"{row.checked:.3f} s", goals, f"{rate / 1e6:.1f} M"
        )
    console = Console(width=120)
    console.print(table)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    console.print(f"peak memory of the process: {peak:.2f} GiB (goal: below 1)")


if __name__ == "__main__":
    main()
