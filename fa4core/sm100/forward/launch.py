"""Compiles forward kernels and calls them with torch tensors.

Used by tests and by `backend="emulator"`. A kernel is compiled once for each `Spec` and kind of
captured tensors; lengths, strides, the scale and what the tensors hold are run-time values.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from fa4core.compile import import_dsl
from fa4core.emulator.session import compile_for_emulator
from fa4core.plan.target import SM100
from fa4core.reference.tiled import Call
from fa4core.sm100.forward.spec import TILE, Spec
from fa4core.sm100.forward.work import tables

import_dsl()

import cutlass  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from fa4core.sm100.forward.kernel import forward  # noqa: E402

Tensor = torch.Tensor


def spec_of(call: Call) -> Spec:
    """What a call's kernel is compiled for."""
    problem, program = call.problem, call.program
    several = max(problem.seqlens_q, default=0) > TILE
    threshold = program.rescale_threshold
    return Spec(
        graph=program.graph.dump(),
        dtype=str(problem.dtype).removeprefix("torch."),
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        tiles=2 if several else 1,
        exp=call.exp,
        threshold=SM100.rescale_threshold if threshold is None else float(threshold),
        negative_scale=call.scale <= 0,
    )


def emulate(call: Call, q: Tensor, k: Tensor, v: Tensor, num_sms: int) -> tuple[Tensor, ...]:
    """Run a call's kernel inside an open emulator block.

    Args:
        call: Validated, with its tile map.
        q, k, v: As the call's layout says; not paged.
        num_sms: CTAs to launch at most.

    Returns:
        Output, LSE and row maximum as `fa4core.reference.tiled.forward`.
    """
    spec, problem = spec_of(call), call.problem
    items, runs = tables(problem, call.tiles, spec.tiles)
    out = q.new_zeros((*q.shape[:-1], problem.head_dim_v))
    rows = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    lse, row_max = (q.new_full(rows, -torch.inf, dtype=torch.float32) for _ in range(2))
    tensors = (q, k, v, out, lse, row_max)
    padded = [t if t.dim() == (4 if i < 4 else 3) else t[None] for i, t in enumerate(tensors)]
    captured = tuple(_captured(c.tensor) for c in call.program.graph.captures)
    arguments = (
        *(_view(t, 3 if i < 4 else 2) for i, t in enumerate(padded)),
        _view(items, 1),
        _view(runs, 1),
        tuple(_view(t, None) for t in captured),
        cutlass.Float32(call.scale),
        cutlass.Int32(max(1, min(num_sms, len(items)))),
    )
    key = tuple((t.dtype, t.dim()) for t in captured)
    function = _compiled(spec, key, _Arguments(arguments))
    if len(items):
        function(*arguments)
    return out, lse, row_max


class _Arguments:
    """Arguments to compile for; equal to all others, so that only the key counts."""

    def __init__(self, values: tuple[Any, ...]):
        self.values = values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Arguments)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=256)
def _compiled(spec: Spec, key: tuple, arguments: _Arguments) -> Any:
    return compile_for_emulator(forward, *arguments.values, spec, target=spec.target)


def _captured(tensor: Tensor | None) -> Tensor:
    """A captured tensor as the kernel takes it: at least one element and one dimension."""
    assert tensor is not None
    if tensor.numel() == 0:
        tensor = tensor.new_zeros((1,) * tensor.dim())  # nothing that counts reads it
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    return tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()


def _view(tensor: Tensor, leading: int | None) -> Any:
    """The DSL's form of a torch tensor, with run-time shape and strides."""
    shown = from_dlpack(tensor.detach(), assumed_align=16 if leading is not None else None)
    if leading is None:
        return shown.mark_layout_dynamic()
    return shown.mark_layout_dynamic(leading_dim=leading)
