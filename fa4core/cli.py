"""The command line, e.g. `python -m fa4core explain variants.sliding_window --window 1024`.

`explain` prints what a call would do and can draw it; `variants` lists the prebuilt ones. Options
that `explain` doesn't know go to the variant's factory, checked against its signature
(`cli_variant`). `emulate`, `export`, `report` and `time` come from modules of their own, imported
only when used.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fa4core import console
from fa4core.cli_variant import (
    REFUSALS,
    SETTINGS,
    factory_parameters,
    prebuilt,
    requested,
    takes_problem,
)

LAZY = {
    "emulate": "fa4core.emulator.cli",
    "export": "fa4core.compile.cli",
    "report": "fa4core.report.cli",
    "time": "fa4core.timing.cli",
}


class _Commands(click.Group):
    """A group that finds some of its commands in modules it imports only on use."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted({*super().list_commands(context), *filter(_exists, LAZY)})

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in LAZY and _exists(name):
            return getattr(importlib.import_module(LAZY[name]), name)
        return super().get_command(context, name)


def _exists(command: str) -> bool:
    try:
        return importlib.util.find_spec(LAZY[command]) is not None
    except ModuleNotFoundError:
        return False


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Attention variants: explain them, draw them, list the prebuilt ones."""


# ---------------------------------------------------------------------------------- explain


@main.command(context_settings=SETTINGS, short_help="Explain what a variant does on a problem.")
@takes_problem
@click.option("--target", type=click.Choice(["sm100", "sm103", "sm90", "cpu"]), default="sm100")
@click.option("--backend", default="auto", show_default=True, help="As for attention().")
@click.option("--pipeline", is_flag=True, help="Print the kernel's pipeline instead.")
@click.option("--draw", type=click.Path(dir_okay=False, path_type=Path), help="Write a picture.")
@click.option("--head", type=click.IntRange(0), default=0, help="Head to draw.")
@click.option("--sequence", type=click.IntRange(0), default=0, help="Sequence to draw.")
def explain(
    target: str,
    backend: str,
    pipeline: bool,
    draw: Path | None,
    head: int,
    sequence: int,
    **asked: Any,
) -> None:
    """Explain what VARIANT does on a problem, and draw it.

    VARIANT is a module of prebuilt variants, such as variants.sliding_window, or module:function.
    Options that are not listed here go to its function: `--window 1024` is `window=1024`.
    """
    from fa4core.plan.report import renderables

    if draw is not None:
        check_folder(draw, "--draw")
    try:
        variant, problem = requested(**asked)
        if pipeline:
            from fa4core.report.pipeline import describe_call

            console.show(*describe_call(variant, problem, target))
            return
        explanation = variant.explain(problem=problem, target=target, backend=backend)
        console.show(*renderables(explanation))
        if draw is not None:
            explanation.draw(draw, sequence=sequence, head=head)
            click.echo(f"drawn: {draw}")
    except REFUSALS as error:
        raise click.ClickException(str(error)) from error


def check_folder(file: Path, option: str) -> None:
    """Before the work, not after it."""
    if not file.parent.is_dir():
        raise click.BadParameter(
            f"there is no folder {str(file.parent)!r} to write {file.name!r} into; name one "
            "that exists",
            param_hint=option,
        )


# --------------------------------------------------------------------------------- variants


@main.command(short_help="List the prebuilt variants and their options.")
def variants() -> None:
    """List the prebuilt variants, what they are, and their options."""
    table = Table.grid(padding=(0, 2))
    for name in prebuilt():
        module = importlib.import_module(f"variants.{name}")
        factory = getattr(module, name, None)
        if not callable(factory):
            continue
        about = (inspect.getdoc(module) or "").split("\n\n")[0].replace("\n", " ")
        cell = Text(about)
        for parameter in factory_parameters(factory):
            cell.append(f"\n{parameter}", style="dim")
        table.add_row(Text(f"variants.{name}", "bold cyan"), cell)
        table.add_row()
    Console(width=None if sys.stdout.isatty() else 100).print(table)
