"""`python -m fa4core time VARIANT ...`: modelled time of a kernel, and of a peer's beside.

Compiles here and runs small problems in the emulator; no GPU is needed, and nothing is measured.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from fa4core import console
from fa4core.cli_variant import REFUSALS, SETTINGS, requested, takes_problem
from fa4core.compile.tools import ToolMissing

if TYPE_CHECKING:
    from fa4core.timing.problem import Modelled
    from fa4core.timing.subject import Subject


@click.command(context_settings=SETTINGS, short_help="Modelled time of a variant's kernel.")
@takes_problem
@click.option("--target", type=click.Choice(["sm100", "sm103", "sm90"]), default="sm100")
@click.option("--peer", type=click.Choice(["fa4"]), help="Model FlashAttention-4's kernel, too.")
@click.option("--only", type=click.Choice(["ours", "fa4"]), help="Model one kernel, whichever.")
@click.option(
    "--ctas",
    type=click.Choice(["1", "2"]),
    multiple=True,
    help="CTAs that share a work tile of ours; twice: both, side by side.",
)
@click.option("--backward", is_flag=True, help="Model backward kernels.")
@click.option("--clock", type=click.FloatRange(min=0.1), help="GHz; the target's if left out.")
@click.option("--seeds", type=click.IntRange(1), default=6, show_default=True)
@click.option("--hot", type=click.IntRange(0), default=0, help="List the costliest instructions.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw who worked when into a file.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write it.")
def time(
    target: str,
    peer: str | None,
    only: str | None,
    ctas: tuple[str, ...],
    backward: bool,
    clock: float | None,
    seeds: int,
    hot: int,
    plot: str | None,
    path: Path | None,
    **asked: Any,
) -> None:
    """Model how long VARIANT's kernel takes on a GPU that is not here.

    The compiled machine code of a few key blocks is replayed cycle by cycle: schedulers, pipes,
    tensor core, shared memory, bulk copies, barriers. Every figure is modelled; the documentation
    says how far off published ones were. VARIANT and the options of its own are as for `explain`.
    """
    from fa4core.timing.graph import NoMatch
    from fa4core.timing.show import renderables

    kernels: list[tuple[str, int | None]] = [("ours", int(n)) for n in ctas] or [("ours", None)]
    if peer:
        both = backward and target != "sm90" and (asked["head_dim"] or 128) >= 128
        kernels += [(peer, 1), (peer, 2)] if both else [(peer, None)]
    kernels = [k for k in kernels if k[0] == only] or [("fa4", None)] if only else kernels
    try:
        requested(**asked)  # what is wrong with it is said at once
        found = _modelled_together(kernels, asked, target, backward, clock, seeds)
    except (*REFUSALS, ToolMissing, NoMatch) as error:
        raise click.ClickException(str(error)) from error
    console.show(*renderables(found, hot))
    if plot is not None:
        from fa4core.timing.plot import draw

        draw(found[0], target).savefig(plot)
        click.echo(f"drawn: {plot}")
    if path is not None:
        path.write_text(json.dumps([_as_json(k) for k in found], indent=1) + "\n")


def _modelled_together(kernels: list[tuple[str, int | None]], *rest: Any) -> list[Modelled]:
    """Each kernel but the first in a process of its own, for they are compiled for seconds."""
    first, *others = kernels
    if not others:
        return [_modelled(first, *rest)]
    with ProcessPoolExecutor(len(others), multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(_modelled, kernel, *rest) for kernel in others]
        return [_modelled(first, *rest), *(p.result() for p in pending)]


def _modelled(
    kernel: tuple[str, int | None],
    asked: dict[str, Any],
    target: str,
    backward: bool,
    clock: float | None,
    seeds: int,
) -> Modelled:
    """One kernel, given as whose it is and its CTAs, if they are not those of the call."""
    from fa4core.timing import backward as of_backward
    from fa4core.timing import peer, subject
    from fa4core.timing.problem import model

    variant, problem = requested(**asked)
    name, ctas = kernel
    makers: dict[str, Callable[..., Subject]] = {"fa4": peer.fa4, "ours": subject.ours}
    if backward:
        makers = {"fa4": of_backward.fa4, "ours": of_backward.ours}
    made = makers[name](variant, problem, target, ctas)
    return model(made, variant, problem, target, clock, seeds)


def _as_json(kernel: Any) -> dict[str, Any]:
    from fa4core.timing.roles import roles_of

    spreads = ("block_cycles", "tile_cycles", "setup_cycles", "seconds", "tflops")
    return {
        "kernel": kernel.title,
        "modelled": True,
        "rows": kernel.rows,
        "ctas": kernel.ctas,
        "clock_ghz": kernel.clock_ghz,
        "busy_cycles_of_a_block": kernel.busy,
        "roles": [attrs.asdict(r) for r in roles_of(kernel.program, kernel.many)],
    } | {name: list(getattr(kernel, name).values) for name in spreads}
