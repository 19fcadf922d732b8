"""Compiles forward kernels and calls them with torch tensors.

Used by tests and by `backend="emulator"`. A kernel is compiled once for each `Spec` and kind of
captured tensors; lengths, strides, the scale and what the tensors hold are run-time values.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from fa4core.compile import import_dsl
from fa4core.emulator.session import compile_for_emulator, current_session, emulator
from fa4core.plan.target import SM100
from fa4core.plan.tiles import TileMap
from fa4core.reference.tiled import Call
from fa4core.sm100.forward.coordinates import packed, packing
from fa4core.sm100.forward.spec import TILE, Spec
from fa4core.sm100.forward.work import tables
from primitives.schedule import Schedule

import_dsl()

import cutlass  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

from fa4core.sm100.forward.kernel import forward  # noqa: E402

Tensor = torch.Tensor


def spec_of(call: Call) -> Spec:
    """What a call's kernel is compiled for."""
    problem, program = call.problem, call.program
    shape = SM100.forward_tile(problem.head_dim, problem.head_dim_v)
    heads = packing(program, problem)
    several = max(problem.seqlens_q, default=0) > TILE // heads
    threshold = program.rescale_threshold
    return Spec(
        graph=program.graph.dump(),
        dtype=str(problem.dtype).removeprefix("torch."),
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        tiles=shape.stages if several else 1,
        exp=call.exp,
        threshold=SM100.rescale_threshold if threshold is None else float(threshold),
        negative_scale=call.scale <= 0,
        packed=heads,
        page_rows=0 if problem.page_size is None else math.gcd(problem.page_size, TILE),
        dynamic=schedule_of(call).source == "dynamic",
    )


def schedule_of(call: Call) -> Schedule:
    """The variant's choice, or the default."""
    return call.program.schedule or Schedule()


def emulated_forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run a call's kernel on the CPU, with every detector of the emulator on.

    Inside an `emulator` block it runs in that session, with its seed and its number of SMs.

    Args:
        call: Validated and supported (`fa4core.sm100.support`).
        q, k, v: As the call's layout says.

    Returns:
        Output, LSE and row maximum as `fa4core.reference.tiled.forward`.
    """
    session = current_session()
    if session is not None:
        return _forward(call, q, k, v, session.num_sms)
    with emulator(target="sm100", record=False) as session:
        return _forward(call, q, k, v, session.num_sms)


def _forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, num_sms: int
) -> tuple[Tensor, Tensor, Tensor]:
    spec, problem = spec_of(call), call.problem
    schedule = schedule_of(call)
    assert isinstance(call.tiles, TileMap)
    rows, tiles = problem, call.tiles
    if spec.packed > 1:
        rows, tiles = packed(call.program, problem, spec.packed)
    items, runs = tables(rows, tiles, spec.tiles, schedule.order)
    out = q.new_zeros((*q.shape[:-1], problem.head_dim_v))
    by_row = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    lse, row_max = (q.new_full(by_row, -torch.inf, dtype=torch.float32) for _ in range(2))
    if not len(items):
        return out, lse, row_max
    inputs = (_loadable(t if t.dim() == 4 else t[None]) for t in (q, k, v))
    outputs = (out if out.dim() == 4 else out[None],)
    statistics = (t if t.dim() == 3 else t[None] for t in (lse, row_max))
    captured = tuple(_captured(c.tensor) for c in call.program.graph.captures)
    ctas = min(num_sms, len(items)) if schedule.source == "persistent" else len(items)
    arguments = (
        *(_view(t, 3) for t in (*inputs, *outputs)),
        *(_view(t, 2) for t in statistics),
        _view(items, 1),
        _view(runs, 1),
        _view(_page_table(call), 1, 4),
        tuple(_view(t, t.dim() - 1, t.element_size()) for t in captured),
        cutlass.Float32(call.scale),
        cutlass.Int32(ctas),
    )
    key = tuple((t.dtype, t.dim()) for t in captured)
    _compiled(spec, key, _Arguments(arguments))(*arguments)
    return out, lse, row_max


def _page_table(call: Call) -> Tensor:
    """(batch, pages) int32, at least one column; without pages nothing reads it."""
    if call.layout is None or call.layout.page_table is None:
        return torch.zeros(1, 1, dtype=torch.int32)
    table = call.layout.page_table.to(torch.int32)
    return table.contiguous() if table.numel() else table.new_zeros(len(table), 1)


def _loadable(tensor: Tensor) -> Tensor:
    """The same elements with a stride that TMA takes in every dimension of extent 1 or 0."""
    if not tensor.numel():
        return tensor.new_zeros(tuple(max(n, 1) for n in tensor.shape))  # nothing reads it
    last = tensor.dim() - 1
    strides = [
        (1 if i == last else 8) if n == 1 else stride
        for i, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    ]
    return tensor.as_strided(tensor.shape, strides)


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
    """A captured tensor as the kernel takes it: row-major, at least one element and dimension."""
    assert tensor is not None
    tensor = tensor.detach()
    if tensor.numel() == 0:
        tensor = tensor.new_zeros((1,) * tensor.dim())  # nothing that counts reads it
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    # viewed twice, so that dimensions of extent 1 get the stride that row-major tensors have
    return tensor.contiguous().view(-1).view(tensor.shape or (1,))


def _view(tensor: Tensor, leading: int, align: int = 16) -> Any:
    """The DSL's form of a torch tensor: shape and strides at run time, but one stride of 1."""
    shown = from_dlpack(tensor.detach(), assumed_align=align)
    return shown.mark_layout_dynamic(leading_dim=leading)
