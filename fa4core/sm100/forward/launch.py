"""What a call's SM100 forward kernel is compiled for, and what it takes at run time.

The two functions to extend for a new choice: `spec_of` for what changes the code, `run_time` for
what changes from call to call. `fa4core.prepared` does the rest. It imports no DSL.
"""

from __future__ import annotations

import torch

from fa4core.plan.target import target as planned
from fa4core.plan.tiles import TileMap
from fa4core.prepared import Skeleton
from fa4core.reference.tiled import Call
from fa4core.sm100.forward.coordinates import packed, packing
from fa4core.sm100.forward.spec import TILE, Spec
from fa4core.sm100.forward.tables import tables
from primitives.schedule import Schedule

Tensor = torch.Tensor


def spec_of(call: Call, target: str) -> Spec:
    """What a call's kernel is compiled for."""
    problem, program, hardware = call.problem, call.program, planned(target)
    shape = hardware.forward_tile(problem.head_dim, problem.head_dim_v)
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
        threshold=hardware.rescale_threshold if threshold is None else float(threshold),
        negative_scale=call.scale <= 0,
        packed=heads,
        dynamic=schedule_of(call).source == "dynamic",
        target=target,
    )


def schedule_of(call: Call) -> Schedule:
    """The variant's choice, or the default."""
    return call.program.schedule or Schedule()


def run_time(call: Call, spec: Spec, sms: int) -> tuple | None:
    """The kernel's arguments after row_max, as `kernel.forward` lists them; None: no work."""
    schedule = schedule_of(call)
    assert isinstance(call.tiles, TileMap)
    problem, tiles = call.problem, call.tiles
    if spec.packed > 1:
        problem, tiles = packed(call.program, problem, spec.packed)
    items, runs = tables(problem, tiles, spec.tiles, schedule, planned(spec.target))
    if not len(items):
        return None
    captured = tuple(_captured(c.tensor) for c in call.program.graph.captures)
    ctas = min(sms, len(items)) if schedule.source == "persistent" else len(items)
    return items, runs, captured, float(call.scale), ctas


FORWARD = Skeleton("fa4core.sm100.forward.kernel:forward", spec_of, run_time)


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
