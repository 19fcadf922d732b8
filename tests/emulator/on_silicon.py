"""Compares the suite's Hopper kernels in the emulator with the same kernels on a Hopper GPU.

    python tests/emulator/on_silicon.py run results.pt       # on a machine with an H100 or H200
    python tests/emulator/on_silicon.py compare results.pt   # anywhere

Results are compared bit by bit; where an approximate instruction or the order of additions may
differ, the greatest distance in units in the last place is printed.
"""

from __future__ import annotations

from pathlib import Path

import click
import torch
from kernels.case import Case, view
from kernels.case import run as emulate
from suite import CASES

SEED = 0


def hopper_cases() -> list[Case]:
    return [case for case in CASES if case.target == "sm90"]


def run_on_gpu(case: Case) -> tuple[torch.Tensor, ...]:
    """The case's outputs from the GPU, on the CPU."""
    from cutlass import cute  # noqa: PLC0415

    torch.manual_seed(SEED)
    inputs = [tensor.cuda() for tensor in case.inputs()]
    outputs = [tensor.cuda() for tensor in case.outputs()]
    tensors = [view(tensor) for tensor in (*inputs, *outputs)]
    cute.compile(case.function, *tensors, *case.constants)(*tensors)
    torch.cuda.synchronize()
    return tuple(tensor.cpu() for tensor in outputs)


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """Greatest distance in representable values."""
    if not a.is_floating_point():
        return int((a.long() - b.long()).abs().max())
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    lowest = torch.iinfo(kind).min

    def ordered(x: torch.Tensor) -> torch.Tensor:
        bits = x.view(kind).long()
        return torch.where(bits < 0, lowest - bits, bits)

    return int((ordered(a) - ordered(b)).abs().max())


@click.group()
def main() -> None:
    """See the module."""


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
def run(path: Path) -> None:
    """Run on this machine's GPU and save the outputs."""
    torch.save({case.name: run_on_gpu(case) for case in hopper_cases()}, path)
    click.echo(f"{len(hopper_cases())} cases, {torch.cuda.get_device_name()}")


@main.command()
@click.argument("path", type=click.Path(path_type=Path, exists=True))
def compare(path: Path) -> None:
    """Run in the emulator and compare with saved outputs."""
    saved = torch.load(path)
    different = 0
    for case in hopper_cases():
        _, outputs, _ = emulate(case, SEED)
        distance = max(ulps(a, b) for a, b in zip(outputs, saved[case.name], strict=True))
        different += distance > 0
        click.echo(f"{case.name:40} {'same bits' if distance == 0 else f'{distance} ulp'}")
    click.echo(f"{different} of {len(hopper_cases())} cases differ in any bit")


if __name__ == "__main__":
    main()
