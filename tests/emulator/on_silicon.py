"""Compares the suite's Hopper kernels in the emulator with the same kernels on a Hopper GPU.

    python tests/emulator/on_silicon.py run results.pt       # on a machine with an H100 or H200
    python tests/emulator/on_silicon.py compare results.pt   # anywhere

Results are compared bit by bit. Where they differ, the greatest difference is printed twice: in
units in the last place, which says nothing near a zero of the result, and relative to the largest
element. Approximate instructions are compared with the PTX ISA's bounds on their errors, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import click
import torch
from kernels import clusters, elementwise, pipelines, reduction, tma, warp_mma
from kernels.case import Case, Tensors, view
from kernels.case import run as emulate
from suite import CASES

SEED = 0


#: Instructions that only Blackwell has, by what the names of their cases begin with.
BLACKWELL = ("packed", "narrow", "8-bit", "tmem", "gemm", "pair", "clc", "persistent dynamic")


def _ulp(exact: torch.Tensor) -> torch.Tensor:
    return torch.exp2(exact.abs().log2().floor() - 23)


#: The errors that the PTX ISA allows, by argument and exact result. Where it counts from the
#: correctly rounded result, half an ulp is between that and the exact one.
ALLOWED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "ex2.approx": lambda _, exact: 2.5 * _ulp(exact),
    "lg2.approx": lambda a, exact: 2**-22 * torch.where((a > 0.5) & (a < 2), 1, exact.abs()),
    "rsqrt.approx": lambda _, exact: 2**-22.9 * exact,
    "rcp.approx": lambda _, exact: 1 * _ulp(exact),
    "sin.approx": lambda _, exact: torch.full_like(exact, 2**-20.5),  # in [-2 pi, 2 pi]
    "cos.approx": lambda _, exact: torch.full_like(exact, 2**-20.5),
    "tanh.approx": lambda _, exact: 2**-11 * exact.abs(),
}


def bound(case: Case, on_gpu: Tensors, emulated: Tensors) -> str:
    """Whether both results of an approximate instruction are as near as the PTX ISA demands."""
    name = case.name.split()[0]
    if name not in ALLOWED:
        return ""
    (argument,) = case.inputs()
    (exact,) = case.expected(argument)
    allowed = ALLOWED[name](argument, exact)
    worst = [float(((y.double() - exact).abs() / allowed).max()) for (y,) in (on_gpu, emulated)]
    return ", error {:.2f} and here {:.2f} of the ISA's bound".format(*worst)


def hopper_cases() -> list[Case]:
    """Cases written for Hopper, and those written for Blackwell whose kernels Hopper has, too."""
    portable = [
        attrs.evolve(case, name=f"{case.name} on sm90", target="sm90")
        for module in (elementwise, reduction, tma, pipelines, clusters, warp_mma)
        for case in module.CASES
        if case.target == "sm100" and not case.name.startswith(BLACKWELL)
    ]
    return [case for case in CASES if case.target == "sm90"] + portable


def run_on_gpu(case: Case) -> tuple[Tensors, Tensors]:
    """The case's inputs, and its outputs from the GPU, both on the CPU."""
    from cutlass import cute

    torch.manual_seed(SEED)
    inputs = [tensor.cuda() for tensor in case.inputs()]
    outputs = [tensor.cuda() for tensor in case.outputs()]
    tensors = [view(tensor) for tensor in (*inputs, *outputs)]
    cute.compile(case.function, *tensors, *case.constants)(*tensors)
    torch.cuda.synchronize()
    return tuple(t.cpu() for t in inputs), tuple(t.cpu() for t in outputs)


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


def apart(a: Tensors, b: Tensors) -> float:
    """Greatest difference relative to the largest element."""
    pairs = [(x.double(), y.double()) for x, y in zip(a, b, strict=True)]
    return max(float((x - y).abs().max() / y.abs().max().clamp_min(1e-30)) for x, y in pairs)


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
        torch.manual_seed(SEED)
        given, on_gpu = saved[case.name]
        if not all(map(torch.equal, case.inputs(), given)):
            raise click.ClickException(f"{case.name}: torch draws other random inputs here")
        _, outputs, _ = emulate(case, SEED)
        distance = max(ulps(a, b) for a, b in zip(outputs, on_gpu, strict=True))
        different += distance > 0
        torch.manual_seed(SEED)
        verdict = f"{distance} ulp, {apart(outputs, on_gpu):.1e} of the largest"
        verdict += bound(case, on_gpu, outputs)
        click.echo(f"{case.name:40} {verdict if distance else 'same bits'}")
    click.echo(f"{different} of {len(hopper_cases())} cases differ in any bit")


if __name__ == "__main__":
    main()
