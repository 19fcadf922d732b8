"""Kernels compiled ahead of time: `export` here, `load` on a machine that must not compile.

    export(variant, problem, "sm100", "attention.fa4")
    attend = load("attention.fa4", device="cuda")
    out = attend(q, k, v)

A file holds a variant as text, the tensors it captured, and one kernel for each of the problems
that differ in what is compiled. Lengths, batch, heads and strides may be others when it is used.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs
import torch

from fa4core.compile import cache
from fa4core.compile.kernel import sources
from fa4core.compile.package import DamagedError, Package
from fa4core.compile.targets import resolve
from fa4core.kept import Calls, calls_of
from fa4core.plan.problem import Problem
from fa4core.variant import Variant

Tensor = torch.Tensor

TARGETS = ("sm100", "sm103")


@attrs.frozen(eq=False)
class Exported:
    """A loaded variant: `attention` takes it in place of a `Variant`, and it can be called.

    Attributes:
        spec: As `Variant.spec`.
        arguments: Captured tensors and scalars: what they were at `export`, or as given to `load`.
        constant: As `Variant.constant`.
        target: Name of the target of its kernels.
        emulated: Whether they run in the emulator only.
        calls: As `Variant.calls`.
    """

    spec: str
    arguments: list[Tensor]
    constant: list[bool]
    target: str
    emulated: bool
    calls: Calls = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "calls", calls_of(self.spec, self.arguments))

    def __reduce__(self) -> tuple:
        return Exported, tuple(getattr(self, a.name) for a in attrs.fields(Exported) if a.init)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """`attention(q, k, v, self, **options)`; the backend is that of the kernels."""
        from fa4core.attention import attention

        options.setdefault("backend", "emulator" if self.emulated else "sm100")
        return attention(q, k, v, self, **options)


def export(
    variant: Variant,
    problems: Problem | Iterable[Problem],
    target: str,
    path: str | Path,
    *,
    scale: float = 1.0,
    emulated: bool = False,
    gradients: bool = False,
) -> None:
    """Compile a variant and write a file that `load` reads. No GPU is needed.

    Args:
        variant: The variant.
        problems: Calls to compile for. One kernel serves every batch, number of heads, length and
            layout; head dims and dtype are compiled in, and so is whether all queries fit into one
            tile.
        target: "sm100" or "sm103".
        path: File to write.
        scale: The sign of the scale that will be used: kernels for negative ones differ.
        emulated: Compile for the emulator instead of a GPU.
        gradients: Compile the kernels of the backward pass, too (not the deterministic ones).

    Raises:
        NotImplementedError: The target's kernels don't take a problem; with the reason.
        ValueError: A target without kernels, or nothing to compile: no problem has any work.
    """
    from fa4core.dispatch import kernels_of

    given = (problems,) if isinstance(problems, Problem) else tuple(problems)
    name = resolve(target).name
    if name not in TARGETS:
        raise ValueError(f"target {target!r} has no kernels yet; {' and '.join(TARGETS)} do")
    kernels = kernels_of(variant, given, name, scale, emulated, gradients)
    if not kernels:
        raise ValueError("no problem has any queries, so there is nothing to compile")
    captured = io.BytesIO()
    torch.save([t.detach() for t in variant.arguments], captured)
    about = {
        "spec": variant.spec,
        "constant": variant.constant,
        "target": name,
        "emulated": emulated,
        "sources": sources(),
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("about.json", json.dumps(about))
        archive.writestr("captured.pt", captured.getvalue())
        for i, kernel in enumerate(kernels):
            archive.writestr(f"kernels/{i}", cache.obtain(kernel).to_bytes())


def load(
    path: str | Path,
    *,
    captured: list[Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> Exported:
    """Read a file that `export` wrote; nothing is compiled, then or later.

    Args:
        path: The file.
        captured: Other captured tensors of the same types, in the order of `Variant.arguments`.
        device: Where the captured tensors of the file go; scalars stay on the CPU.

    Raises:
        ValueError: The file is none of `export`'s, was written by another version of this project,
            or the captured tensors don't fit.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read("about.json"))
            saved = torch.load(io.BytesIO(archive.read("captured.pt")), weights_only=True)
            names = [n for n in archive.namelist() if n.startswith("kernels/")]
            packages = [Package.from_bytes(archive.read(name)) for name in names]
    except (zipfile.BadZipFile, KeyError, DamagedError) as error:
        raise ValueError(f"{path} is no file written by fa4core.compile.export: {error}") from error
    if about["sources"] != sources():
        raise ValueError(
            f"{path} was exported by another version of this project, whose kernels may take "
            "other arguments; export it again with this one"
        )
    arguments = [t if t.dim() == 0 else t.to(device) for t in saved]
    if captured is not None:
        _check_captured(saved, captured)
        arguments = list(captured)
    for package in packages:
        cache.add(package)
    return Exported(about["spec"], arguments, about["constant"], about["target"], about["emulated"])


def _check_captured(saved: list[Tensor], given: list[Tensor]) -> None:
    expected, found = ([(t.dtype, t.dim()) for t in tensors] for tensors in (saved, given))
    if expected != found:
        raise ValueError(
            f"captured tensors of (dtype, rank) {found} were given; the file takes {expected}"
        )
