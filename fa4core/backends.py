"""Backends: which exist, which one a call takes, and why.

Nothing falls back silently: a backend that was asked for and cannot do it raises with the reason,
and `auto` says what it chose wherever that is not what one would expect.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Literal, get_args

import attrs
import torch

from fa4core.compile import cache
from fa4core.plan.captured import check_captured
from fa4core.plan.problem import Problem
from fa4core.plan.target import of_capability
from fa4core.program import Program
from fa4core.sm90 import support as sm90
from fa4core.sm100 import support as sm100
from fa4core.variant import Variant

Backend = Literal["auto", "sm100", "sm90", "reference", "emulator"]

#: The largest rescale threshold, log2 domain: P may grow to 2^threshold and must stay finite.
_MAX_THRESHOLD = {torch.float16: 15.0}
_MAX_THRESHOLD_ELSE = 64.0
_NO_COMPILER = "CuTe DSL, which compiles kernels, is not installed: pip install nvidia-cutlass-dsl"


@attrs.frozen
class _Kernels:
    """A family of kernels.

    Attributes:
        title: What it is called.
        gpu: What it needs, in words.
        targets: What it is compiled for.
        refusal: Why it can't run a program on a problem, or None.
        backward_refusal: Why it has no backward pass for what it can run, or None.
    """

    title: str
    gpu: str
    targets: tuple[str, ...]
    refusal: Callable[[Program, Problem], str | None]
    backward_refusal: Callable[[Program, Problem], str | None]


KERNELS = {
    "sm100": _Kernels(
        "SM100",
        "a Blackwell GPU (compute capability 10.0 or 10.3)",
        ("sm100", "sm103"),
        sm100.refusal,
        sm100.backward_refusal,
    ),
    "sm90": _Kernels(
        "SM90",
        "a Hopper GPU (compute capability 9.0)",
        ("sm90",),
        sm90.refusal,
        sm90.backward_refusal,
    ),
}


@attrs.frozen
class Support:
    """An answer: `ok`, and the reason why not (or which backend does it, and why)."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def supports(
    variant: Variant,
    problem: Problem,
    backend: str = "auto",
    device: torch.device | str = "cpu",
    *,
    gradients: bool = False,
) -> Support:
    """Whether a backend can run a variant on a problem; nothing is computed or compiled.

    Args:
        variant: The variant.
        problem: Sizes; `Problem.from_tensors(q, k, v, layout)` reads them from tensors.
        backend: "auto", "sm100", "sm90", "reference" or "emulator".
        device: Where the tensors are.
        gradients: Whether it is to compute gradients, too.
    """
    try:
        chosen, why = choose(backend, torch.device(device), variant.program, problem)
        check(variant.program, problem, torch.device(device), chosen)
        if gradients:
            by, reason = gradients_by(backend, chosen, variant.program, problem)
            why = why if by == chosen else f"{why}; {by} computes gradients: {reason}"
    except (ValueError, IndexError, NotImplementedError) as error:
        return Support(False, str(error))
    return Support(True, f"{chosen}: {why}")


def choose(
    backend: str,
    device: torch.device,
    program: Program | None = None,
    problem: Problem | None = None,
) -> tuple[str, str]:
    """The backend a call takes and why; "auto" needs all four to know.

    Raises:
        ValueError: No backend of this name.
        NotImplementedError: It can't run on this device, or not here.
    """
    if backend not in get_args(Backend):
        accepted = ", ".join(map(repr, get_args(Backend)))
        raise ValueError(f"backend={backend!r}; accepted are {accepted}")
    if backend == "auto":
        return _automatic(device, program, problem)
    if backend != "reference" and not _has_compiler():
        raise NotImplementedError(f"backend={backend!r}: {_NO_COMPILER}")
    if backend in KERNELS and (reason := _no_gpu(backend, device)):
        raise NotImplementedError(
            f"backend={backend!r}: {reason}; use backend='emulator', which runs kernels on a CPU, "
            "or use backend='reference' (any device) or 'auto'"
        )
    if backend == "emulator" and device.type != "cpu":
        raise NotImplementedError(
            f"backend='emulator' with tensors on {device}: it runs kernels on the CPU; move the "
            "tensors there"
        )
    return backend, "asked for"


def _automatic(
    device: torch.device, program: Program | None, problem: Problem | None
) -> tuple[str, str]:
    if device.type == "cpu":
        return "reference", "the tensors are on the CPU"
    backend = backend_of(device)
    if backend is None:
        return "reference", f"the tensors are on {device}, and this version has no kernels for it"
    if not _has_compiler():
        return "reference", _NO_COMPILER
    kernels = KERNELS[backend]
    reason = kernels.refusal(program, problem) if program and problem else None
    if reason is not None:
        return "reference", f"the {kernels.title} kernels refuse the call: {reason}"
    return backend, f"the tensors are on {device}, a {torch.cuda.get_device_name(device)}"


def gradients_by(backend: str, chosen: str, program: Program, problem: Problem) -> tuple[str, str]:
    """The backend that computes gradients where `chosen` computes the output, and why.

    Raises:
        NotImplementedError: A backend was named and has no kernels for them; with the reason.
    """
    if chosen == "reference":
        return chosen, "it computes the output"
    reason = KERNELS[family_of(chosen)].backward_refusal(program, problem)
    if reason is None:
        return chosen, "it computes the output"
    if backend != "auto":
        raise NotImplementedError(
            f"backend={chosen!r} can't compute these gradients: {reason}; call it under "
            "torch.no_grad(), or use backend='reference'"
        )
    return "reference", f"no kernel computes these gradients: {reason}"


def _has_compiler() -> bool:
    """Whether kernels can be compiled, or are there already (`fa4core.compile.load`)."""
    return importlib.util.find_spec("cutlass") is not None or not cache.is_empty()


def _no_gpu(backend: str, device: torch.device) -> str | None:
    """Why a backend's kernels can't run on a device, or None if they can."""
    needs = f"it needs {KERNELS[backend].gpu}"
    if device.type != "cuda":
        return f"the tensors are on {device}, and {needs}"
    if not torch.cuda.is_available():
        return f"torch sees no GPU here, and {needs}"
    if target_of(device) in KERNELS[backend].targets:
        return None
    title = torch.cuda.get_device_name(device)
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return f"{device} is a {title} of capability {capability}, and {needs}"


def target_of(device: torch.device) -> str | None:
    """The target that kernels are compiled for to run on a GPU, or None."""
    found = of_capability(*torch.cuda.get_device_capability(device))
    return None if found is None else found.name


def backend_of(device: torch.device) -> str | None:
    """The backend that "auto" takes for tensors on a device, or None."""
    return next((name for name in KERNELS if _no_gpu(name, device) is None), None)


def family_of(chosen: str) -> str:
    """The kernels that a backend runs."""
    if chosen != "emulator":
        return chosen
    target = emulated_target()
    return next(name for name, kernels in KERNELS.items() if target in kernels.targets)


def emulated_target() -> str:
    """What the emulator's calls are planned and compiled for: the target of the open session."""
    from fa4core.emulator.session import current_session

    session = current_session()
    return "sm100" if session is None else session.target.name


_announced: set[str] = set()


def announce(chosen: str, why: str) -> None:
    """Say once what `auto` chose, where it is not the fast path one may expect on a GPU."""
    if why not in _announced:
        _announced.add(why)
        warnings.warn(
            f"attention: backend='auto' takes {chosen!r}, because {why}. "
            f"backend={chosen!r} asks for it without this warning.",
            stacklevel=2,
        )


def check(
    program: Program, problem: Problem, device: torch.device, chosen: str = "reference"
) -> None:
    """Check what depends on both the variant and the problem.

    Raises:
        ValueError, IndexError: Saying what was given, what is accepted and what to do.
        NotImplementedError: The chosen backend can't do it; with the reason.
    """
    if chosen != "reference" and (reason := KERNELS[family_of(chosen)].refusal(program, problem)):
        raise NotImplementedError(f"backend={chosen!r}: {reason}, or use backend='reference'")
    check_captured(program.graph, problem, device)
    most = _MAX_THRESHOLD.get(problem.dtype, _MAX_THRESHOLD_ELSE)
    if program.rescale_threshold is not None and program.rescale_threshold > most:
        raise ValueError(
            f"rescale_threshold={program.rescale_threshold} with {problem.dtype}: probabilities up "
            f"to 2^threshold would overflow; at most {most} is accepted"
        )
