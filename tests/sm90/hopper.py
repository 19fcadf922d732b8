"""Runs cases of the testing kit on the Hopper kernels: on a Hopper GPU if this machine has one,
else in the emulator with every detector on."""

from __future__ import annotations

import contextlib
import math

import torch
from hopper_gpu import GPU, on_gpu

from fa4core.dispatch import analysed
from fa4core.emulator.session import emulator
from fa4core.places import in_emulator, on_device
from fa4core.plan.problem import Problem
from fa4core.plan.target import SM90
from fa4core.prepared import Prepared, Skeleton, prepare
from fa4core.program import Program
from fa4core.sm90.forward.launch import FORWARD
from fa4core.testing import Case, LayoutSpec, Shape, assert_close_to_oracle, run

FIXED = LayoutSpec()
DEVICE = torch.device("cuda" if GPU else "cpu")


def prepared(
    q, k, v, variant, *, layout=None, scale=None, skeleton: Skeleton = FORWARD
) -> tuple[Prepared, tuple]:
    """A call ready to run where the kernels run, and its q, k, v there."""
    problem = Problem.from_tensors(q, k, v, layout)
    captured = [c.tensor.to(DEVICE) for c in variant.program.captures]
    program = Program.parse(variant.program.dump(), captured)
    scale = 1 / math.sqrt(problem.head_dim) if scale is None else scale
    inputs = tuple(_there(t) for t in (q, k, v))
    place = on_device("sm90", DEVICE) if GPU else in_emulator("sm90")
    return prepare(skeleton, analysed(program, problem, layout, scale), *inputs, place), inputs


def _there(tensor: torch.Tensor) -> torch.Tensor:
    """On the device, with the strides it has."""
    return on_gpu(tensor) if GPU else tensor


def execute(
    variant: str, shape: Shape, layout: LayoutSpec = FIXED, *, dtype: str = "bfloat16",
    seed: int = 0, num_sms: int = 2, scale: float | None = None, skeleton: Skeleton = FORWARD,
    **rest,
) -> None:  # fmt: skip
    """Compare output, LSE and row maximum with the oracle; `num_sms` is the emulator's."""
    case = Case(variant, shape, layout, dtype=dtype, seed=seed, **rest)
    check(case, seed, num_sms=num_sms, scale=scale, skeleton=skeleton)


def check(
    case: Case, seed: int = 0, *, num_sms: int = 2, scale: float | None = None,
    skeleton: Skeleton = FORWARD,
) -> None:  # fmt: skip
    """As `execute`, of a case; `seed` is the emulator's."""

    def attend(q, k, v, variant, *, layout, scale):
        call, inputs = prepared(q, k, v, variant, layout=layout, scale=scale, skeleton=skeleton)
        return tuple(t.cpu() for t in call(*inputs))

    inputs = case.inputs()
    session = contextlib.nullcontext() if GPU else emulator("sm90", seed, num_sms=num_sms)
    with session:
        results = run(attend, inputs, scale=scale, backward=False)
    head_dim = max(case.shape.head_dim, case.shape.head_dim_v)
    exp = SM90.exp(head_dim) if GPU else None  # emulated: exact
    assert_close_to_oracle(results, inputs, scale=scale, context=str(case), exp=exp)
