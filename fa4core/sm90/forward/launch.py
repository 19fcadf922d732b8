"""Compiles Hopper forward kernels and calls them with torch tensors, in the emulator or on a GPU.

A kernel is compiled once for each `Spec` and kind of captured tensors; lengths, strides, the scale
and what the tensors hold are run-time values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch

from fa4core.compile import cross_compile, import_dsl
from fa4core.emulator.session import compile_for_emulator, current_session
from fa4core.plan.problem import Problem
from fa4core.plan.target import SM90
from fa4core.plan.tiles import TileMap, tile_map
from fa4core.program import Program
from fa4core.sm90.forward.spec import ROWS, Spec
from fa4core.sm90.forward.tuning import Shape, shape_of
from fa4core.sm100.forward.launch import _Arguments, _captured, _loadable, _view
from fa4core.sm100.forward.work import tables
from primitives.exp import hardware
from primitives.schedule import Schedule

import_dsl()

import cutlass  # noqa: E402

from fa4core.sm90.forward.kernel import forward  # noqa: E402

Tensor = torch.Tensor


def spec_of(program: Program, problem: Problem, scale: float, shape: Shape | None = None) -> Spec:
    """What a call's kernel is compiled for; `shape` overrides the tuned one."""
    rows = max(problem.seqlens_q, default=0)
    threshold = program.rescale_threshold
    return Spec(
        graph=program.graph.dump(),
        dtype=str(problem.dtype).removeprefix("torch."),
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        shape=shape or shape_of(problem.head_dim, problem.head_dim_v, rows),
        exp=program.exp or hardware(),
        threshold=SM90.rescale_threshold if threshold is None else float(threshold),
        negative_scale=scale <= 0,
    )


def tiles_of(spec: Spec, program: Program, problem: Problem) -> TileMap:
    """The mask's tile map in the kernel's tiles."""
    return tile_map(
        program.graph.mask,
        batch=problem.batch,
        heads=problem.heads_q,
        seqlens_q=problem.seqlens_q,
        seqlens_k=problem.seqlens_k,
        tile_q=ROWS,
        tile_k=spec.keys,
    )


@attrs.frozen(eq=False)
class Prepared:
    """A call with its plan made and its kernel compiled; `__call__` launches it, again and again.

    Attributes:
        kernel: Takes `arguments`.
        arguments: In the kernel's form; they hold the tensors.
        out, lse, row_max: Where results go.
    """

    kernel: Callable[..., None] | None
    arguments: tuple[Any, ...]
    out: Tensor
    lse: Tensor
    row_max: Tensor

    def __call__(self) -> tuple[Tensor, Tensor, Tensor]:
        if self.kernel is not None:
            self.kernel(*self.arguments)
        return self.out, self.lse, self.row_max


def prepare(
    program: Program, problem: Problem, scale: float, q: Tensor, k: Tensor, v: Tensor,
    shape: Shape | None = None,
) -> Prepared:  # fmt: skip
    """Plan a forward call and compile its kernel.

    On CPU tensors it runs in the emulator and has to be called inside an `emulator` block.
    """
    spec = spec_of(program, problem, scale, shape)
    schedule = program.schedule or Schedule()
    tiles = tiles_of(spec, program, problem)
    items, runs = tables(problem, tiles, spec.tiles, schedule.order)
    out = q.new_zeros((*q.shape[:-1], problem.head_dim_v))
    rows = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    lse, row_max = (q.new_full(rows, -torch.inf, dtype=torch.float32) for _ in range(2))
    if not len(items):
        return Prepared(None, (), out, lse, row_max)
    inputs = (_loadable(t if t.dim() == 4 else t[None]) for t in (q, k, v))
    outputs = (out if out.dim() == 4 else out[None],)
    statistics = (t if t.dim() == 3 else t[None] for t in (lse, row_max))
    captured = tuple(_captured(c.tensor) for c in program.graph.captures)
    ctas = len(items) if schedule.source == "one_tile" else min(_sms(q), len(items))
    arguments = (
        *(_view(t, 3) for t in (*inputs, *outputs)),
        *(_view(t, 2) for t in statistics),
        _view(items.to(q.device), 1),
        _view(runs.to(q.device), 1),
        tuple(_view(t, t.dim() - 1, t.element_size()) for t in captured),
        cutlass.Float32(scale),
        cutlass.Int32(ctas),
    )
    key = tuple((t.dtype, t.dim()) for t in captured)
    kernel = _compiled(spec, key, q.device.type, _Arguments(arguments))
    return Prepared(kernel, arguments, out, lse, row_max)


def _sms(q: Tensor) -> int:
    if q.device.type == "cuda":
        return torch.cuda.get_device_properties(q.device).multi_processor_count
    session = current_session()
    if session is None:
        raise RuntimeError("on CPU tensors the kernel runs inside `with emulator(target='sm90')`")
    return session.num_sms


@functools.lru_cache(maxsize=256)
def _compiled(spec: Spec, key: tuple, device: str, arguments: _Arguments) -> Any:
    compile_ = cross_compile if device == "cuda" else compile_for_emulator
    return compile_(forward, *arguments.values, spec, target=spec.target)
