"""A `Case`: one kernel, its inputs, and what torch says the outputs should be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch

from fa4core.compile import import_dsl
from fa4core.emulator.launch import Launch
from fa4core.emulator.session import Session, emulator

import_dsl()

import cutlass  # noqa: E402
from cutlass import cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

Tensors = tuple[torch.Tensor, ...]

_FP8 = {
    torch.float8_e4m3fn: cutlass.Float8E4M3FN,
    torch.float8_e5m2: cutlass.Float8E5M2,
}


@attrs.frozen(eq=False)
class Case:
    """inputs and outputs make tensors (outputs unwritten ones); the kernel's function gets them in
    that order, then the constants. expected maps inputs to outputs."""

    name: str
    function: Callable[..., Any]
    inputs: Callable[[], Tensors]
    outputs: Callable[[], Tensors]
    expected: Callable[..., Tensors]
    constants: tuple[Any, ...] = ()
    target: str = "sm100"
    tolerance: float = 0.0  # of the largest expected magnitude; 0 means the same bits
    num_sms: int | None = None

    def __str__(self) -> str:
        return self.name


def view(tensor: torch.Tensor) -> Any:
    """The DSL's form of a torch tensor, with static shape and strides."""
    if tensor.dtype in _FP8:
        shown = from_dlpack(tensor.view(torch.uint8), assumed_align=16)
        shown.element_type = _FP8[tensor.dtype]
        return shown
    return from_dlpack(tensor, assumed_align=16)


@functools.cache
def compiled(case: Case) -> Callable[..., Any]:
    """The case's function, compiled once per process."""
    with emulator(target=case.target, record=False, line_info=True):
        tensors = (*case.inputs(), *case.outputs())
        return cute.compile(case.function, *map(view, tensors), *case.constants)


def run(
    case: Case,
    seed: int = 0,
    detect: str | frozenset[str] = "all",
    change: Callable[[Launch], Launch] | None = None,
) -> tuple[Session, Tensors, Tensors]:
    """Run a case; gives the session, the outputs and what they should be."""
    function = compiled(case)
    torch.manual_seed(seed)
    inputs = case.inputs()
    with emulator(
        target=case.target, seed=seed, detect=detect, num_sms=case.num_sms, record=False
    ) as session:
        if change is not None:
            session.transform(change)
        outputs = case.outputs()
        function(*map(view, (*inputs, *outputs)))
    return session, outputs, case.expected(*inputs)


def agree(case: Case, outputs: Tensors, expected: Tensors) -> bool:
    """Whether outputs are what they should be, to the case's tolerance."""
    for got, want in zip(outputs, expected, strict=True):
        if case.tolerance == 0.0:
            if not torch.equal(got, want.to(got.dtype)):
                return False
        else:
            scale = want.double().abs().max().clamp_min(1e-30)
            error = (got.double() - want.double()).abs().max() / scale
            if not bool(error <= case.tolerance):  # NaN is no agreement
                return False
    return True
