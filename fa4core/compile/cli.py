"""`python -m fa4core export VARIANT -o FILE`: `fa4core.compile.export` of a prebuilt variant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fa4core.cli import check_folder
from fa4core.cli_variant import REFUSALS, SETTINGS, requested, takes_problem
from fa4core.compile.aot import TARGETS
from fa4core.compile.aot import export as write


@click.command(context_settings=SETTINGS, short_help="Compile a variant ahead of time.")
@takes_problem
@click.option("--target", type=click.Choice(TARGETS), default="sm100", show_default=True)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file that fa4core.compile.load reads.",
)
@click.option("--negative-scale", is_flag=True, help="For calls with a scale of 0 or less.")
@click.option("--emulated", is_flag=True, help="For the emulator instead of a GPU.")
@click.option("--gradients", is_flag=True, help="The kernels of the backward pass, too.")
def export(
    target: str,
    output: Path,
    negative_scale: bool,
    emulated: bool,
    gradients: bool,
    **asked: Any,
) -> None:
    """Compile VARIANT for a problem and write a file; no GPU is needed.

    VARIANT and its options are those of `explain`. The kernel serves every batch, number of heads
    and length, but calls whose queries fit into one tile have one of their own: give --seqlen-q 1
    for these.
    """
    check_folder(output, "--output")
    try:
        variant, problem = requested(**asked)
        scale = -1.0 if negative_scale else 1.0
        write(variant, problem, target, output, scale=scale, emulated=emulated, gradients=gradients)
    except REFUSALS as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{output}: {asked['variant']} for {target}, {output.stat().st_size:,} bytes")
