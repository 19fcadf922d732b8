"""``python -m fa4core emulate script.py``: run a script that says device="cuda" on a CPU.

The script needs no change. Its kernels are compiled for the target and executed by the emulator.
"""

from __future__ import annotations

import runpy
import sys
from collections import Counter
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from fa4core.compile.environment import import_dsl
from fa4core.compile.targets import TARGETS, resolve
from fa4core.emulator.host.facade import cuda_facade
from fa4core.emulator.launch import EmulatorError, Statistics
from fa4core.emulator.session import emulator


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--target", type=click.Choice(sorted(TARGETS)), default="sm100", show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Chooses the hostile order.")
@click.option(
    "--detect", default="all", show_default=True, help='"all", "none" or names, comma-separated.'
)
@click.option("--num-sms", type=int, default=None, help="What kernels are told; default: target's.")
@click.option("--statistics/--no-statistics", default=True, help="Print what each launch did.")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def emulate(
    target: str,
    seed: int,
    detect: str,
    num_sms: int | None,
    statistics: bool,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT with ARGUMENTS, its CUDA tensors on the CPU and its kernels in the emulator."""
    import_dsl()
    names = detect if detect in ("all", "none") else detect.split(",")
    sms = num_sms or resolve(target).num_sms
    saved = sys.argv, list(sys.path)
    failure: EmulatorError | None = None
    with emulator(target, seed, names, num_sms=sms, record=False, line_info=True) as session:
        try:
            sys.argv = [str(script), *arguments]
            sys.path.insert(0, str(script.parent))
            with cuda_facade(session.target, sms):
                runpy.run_path(str(script), run_name="__main__")
        except EmulatorError as error:
            failure = error
        finally:
            sys.argv, sys.path[:] = saved
    if statistics and session.statistics:
        _print(session.statistics)
    if failure is not None:
        raise click.ClickException(str(failure))


def _print(statistics: tuple[Statistics, ...]) -> None:
    table = Table("launch", "seconds", "warp instructions", "MMAs", "barrier waits", "bytes moved")
    for launch in statistics:
        counts = (launch.instructions, launch.mma, launch.barrier_waits, launch.bytes)
        totals = [f"{Counter(count).total():,}" for count in counts]
        table.add_row(launch.name, f"{launch.seconds:.3f}", *totals)
    Console(stderr=True).print(table)
