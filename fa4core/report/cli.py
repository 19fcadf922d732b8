"""`python -m fa4core report VARIANT ...`: static figures of a kernel, and a peer's beside.

Compiles here, for the target asked for; no GPU is needed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import click

from fa4core import console
from fa4core.cli_variant import REFUSALS, SETTINGS, requested, takes_problem
from fa4core.compile.artifact import Artifact
from fa4core.compile.build import build
from fa4core.compile.kernel import Kernel as Source
from fa4core.compile.targets import resolve
from fa4core.compile.tools import ToolMissing
from fa4core.places import Place
from fa4core.plan.plan import Plan
from fa4core.plan.problem import Problem
from fa4core.plan.target import target as planned
from fa4core.prepared import kernel_of
from fa4core.report import check as checking
from fa4core.report.figures import Shape
from fa4core.report.kernel import Kernel, examine
from fa4core.report.model import Cycles, paper
from fa4core.report.peer import compile_fa4, fa4_arguments, import_fa4
from fa4core.report.pipeline import call_for
from fa4core.report.show import renderables
from fa4core.sm100.forward.launch import FORWARD
from fa4core.sm100.forward.spec import Spec
from fa4core.variant import Variant

FA4 = "fa4"
ELF = b"\x7fELF"  # how a cubin begins
OURS, PEER = "ours", "peer"


@click.command(context_settings=SETTINGS, short_help="Static figures of a variant's kernel.")
@takes_problem
@click.option("--target", type=click.Choice(["sm100", "sm103"]), default="sm100")
@click.option("--peer", help='Compare with "fa4", compiled here, or with the kernel of a cubin.')
@click.option("--backward", is_flag=True, help="Report on the kernels of the backward pass.")
@click.option("--check", is_flag=True, help="Hold ours to the peer's; fails if it is worse.")
@click.option("--repeat", type=click.IntRange(1), help="Compilations each; 1, or 3 with --check.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Write it.")
def report(
    target: str,
    peer: str | None,
    backward: bool,
    check: bool,
    repeat: int | None,
    path: Path | None,
    **asked: Any,
) -> None:
    """Compile VARIANT's kernel and print what its machine code says.

    Registers, spills, memory; instructions by pipe and barrier operations in each role's inner
    loop; and cycles modelled from them, beside the paper's roofline. VARIANT and the options of its
    own are as for `explain`.
    """
    if check and peer is None:
        raise click.UsageError(f"--check compares with a peer; give --peer {FA4} or a cubin")
    if backward:
        _report_backward(target, peer, check, repeat, path, asked)
        return
    found: list[checking.Line] = []
    try:
        variant, problem = requested(**asked)
        subject = Subject.of(variant, problem, target)
        kernels = _kernels(subject, peer, repeat or (3 if check else 1))
        if check:
            found = checking.lines(kernels[0], subject.plain(), kernels[1])
    except (*REFUSALS, ToolMissing) as error:
        raise click.ClickException(str(error)) from error
    console.show(*renderables(kernels, subject.spec, subject.roofline, found))
    if path is not None:
        path.write_text(json.dumps(_as_json(kernels, subject, found), indent=1) + "\n")
    if not all(line.ok for line in found):
        raise SystemExit(1)


def _report_backward(
    target: str,
    peer: str | None,
    check: bool,
    repeat: int | None,
    path: Path | None,
    asked: dict[str, Any],
) -> None:
    from fa4core.report.backward import kernels_of, lines
    from fa4core.report.show_backward import renderables as tables
    from fa4core.timing.graph import NoMatch

    if peer not in (None, FA4) or repeat is not None:
        raise click.UsageError(
            f"--backward runs kernels in the emulator, once; --peer {FA4} goes with it, neither a "
            "cubin nor --repeat"
        )
    try:
        kernels, missing = kernels_of(*requested(**asked), target, peer is not None)
    except (*REFUSALS, ToolMissing, NoMatch) as error:
        raise click.ClickException(str(error)) from error
    found = lines(kernels) if check else []
    console.show(*tables(kernels, missing, found))
    if path is not None:
        known = {"kernels": [k.as_json() for k in kernels], "missing": missing}
        known["check"] = [attrs.asdict(line) | {"ok": line.ok} for line in found]
        path.write_text(json.dumps(known, indent=1) + "\n")
    if not all(line.ok for line in found):
        raise SystemExit(1)


@attrs.frozen
class Subject:
    """What is reported on.

    Attributes:
        plan: Of a call, for a target.
        source: What its kernel is compiled from.
    """

    plan: Plan
    source: Source

    @classmethod
    def of(cls, variant: Variant, problem: Problem, target: str) -> Subject:
        """The forward kernel of a call.

        Raises:
            NotImplementedError, ValueError: It has none; with the reason.
        """
        place = Place(target, sms=1, emulated=False)  # how many SMs, no code depends on
        source, _ = kernel_of(FORWARD, call_for(variant, problem, target), place)
        if source is None:
            raise ValueError("no query and no key to attend to: such a call launches nothing")
        return cls(Plan(variant, problem, planned(target)), source)

    @property
    def spec(self) -> Spec:
        return self.source.spec

    @property
    def shape(self) -> Shape:
        return Shape(self.spec.tiles, self.spec.d, self.spec.d_v)

    @property
    def roofline(self) -> dict[str, Cycles]:
        return {kind: paper(self.plan, kind) for kind in ("unmasked", "masked")}

    def compile(self) -> Artifact:
        """Compile it anew."""
        package = build(self.source)
        return Artifact(resolve(package.target), OURS, package.ptx, package.cubin)

    def examine(self, title: str, artifact: Artifact, **more: Any) -> Kernel:
        return examine(title, artifact, self.shape, self.plan.target.measured, **more)

    def plain(self) -> Kernel | None:
        """Plain attention with the same policies; None if the variant is that."""
        v = self.plan.variant
        plain = Variant(exp=v.exp, rescale_threshold=v.rescale_threshold, schedule=v.schedule)
        if plain.graph.dump() == v.graph.dump():
            return None
        other = Subject.of(plain, self.plan.problem, self.source.target)
        return other.examine("plain", other.compile())


def _kernels(subject: Subject, peer: str | None, repeat: int) -> list[Kernel]:
    """Ours, and the peer's."""
    makers = {OURS: subject.compile}
    others = []
    if peer == FA4:
        call = subject.plan.variant, subject.plan.problem, resolve(subject.source.target)
        fa4_arguments(call[0])
        import_fa4()
        makers[FA4] = lambda: compile_fa4(*call)
    elif peer is not None:
        others = [subject.examine(PEER, _read(Path(peer), subject.source.target))]
    smem = {OURS: subject.spec.smem_bytes}
    return [
        subject.examine(title, artifact, smem_bytes=smem.get(title), seconds=seconds)
        for title, (artifact, seconds) in _compiled(makers, repeat).items()
    ] + others


def _compiled(
    makers: dict[str, Callable[[], Artifact]], repeat: int
) -> dict[str, tuple[Artifact, tuple[float, ...]]]:
    """What each makes, and its times; they take turns, so that they meet the same machine."""
    made: dict[str, Artifact] = {}
    seconds: dict[str, tuple[float, ...]] = dict.fromkeys(makers, ())
    for _ in range(repeat):
        for title, make in makers.items():
            start = time.perf_counter()
            made[title] = make()
            seconds[title] += (time.perf_counter() - start,)
    return {title: (made[title], seconds[title]) for title in makers}


def _read(path: Path, target: str) -> Artifact:
    if not path.is_file() or not path.read_bytes().startswith(ELF):
        raise click.BadParameter(
            f'{str(path)!r} is no cubin; give the path of one, or "{FA4}"', param_hint="--peer"
        )
    return Artifact(resolve(target), path.name, "", path.read_bytes())


def _as_json(kernels: list[Kernel], subject: Subject, found: list[checking.Line]) -> dict[str, Any]:
    return {
        "spec": attrs.asdict(subject.spec),
        "kernels": [kernel.as_json() for kernel in kernels],
        "roofline_cycles": {kind: c.units for kind, c in subject.roofline.items()},
        "check": [attrs.asdict(line) | {"ok": line.ok} for line in found],
    }
