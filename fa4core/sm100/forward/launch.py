"""What a call's SM100 forward kernel is compiled for, and what it takes at run time.

The two functions to extend for a new choice: `spec_of` for what changes the code, `run_time` for
what changes from call to call. `fa4core.prepared` does the rest. It imports no DSL.
"""

from __future__ import annotations

import math

import torch

from fa4core.compile.kernel import Kernel
from fa4core.forward.arguments import captured
from fa4core.forward.metadata import Metadata, metadata, pre_pass
from fa4core.places import Place
from fa4core.plan.choose import choose
from fa4core.plan.target import SM100
from fa4core.plan.target import target as planned
from fa4core.plan.tiles import TileMap
from fa4core.prepared import Shape, Skeleton
from fa4core.reference.tiled import Call
from fa4core.sm100.forward.coordinates import packed, packing
from fa4core.sm100.forward.spec import TILE, Spec
from primitives.schedule import Schedule

Tensor = torch.Tensor


def spec_of(call: Call, target: str) -> Spec:
    """What a call's kernel is compiled for."""
    problem, program, hardware = call.problem, call.program, planned(target)
    shape = hardware.forward_tile(problem.head_dim, problem.head_dim_v)
    heads = packing(program, problem)
    ctas = schedule_of(call).ctas
    several = max(problem.seqlens_q, default=0) > TILE // heads * ctas
    threshold = program.rescale_threshold
    return Spec(
        graph=program.graph.dump(),
        dtype=str(problem.dtype).removeprefix("torch."),
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        tiles=shape.stages if several else 1,
        ctas=ctas,
        exp=program.exp or hardware.exp,
        threshold=hardware.rescale_threshold if threshold is None else float(threshold),
        negative_scale=call.scale <= 0,
        packed=heads,
        page_rows=0 if problem.page_size is None else math.gcd(problem.page_size, TILE),
        split=splits_of(call) > 1,
        dynamic=schedule_of(call).source == "dynamic",
        target=target,
    )


def schedule_of(call: Call) -> Schedule:
    """The variant's choice, or what `choose` says."""
    if call.program.schedule is not None:
        return call.program.schedule
    assert isinstance(call.tiles, TileMap)
    return choose(call.problem, call.tiles, SM100)


def splits_of(call: Call) -> int:
    """Shares of the keys of a tile."""
    return schedule_of(call).num_splits


def host_function(spec: Spec) -> str:
    """The host function that launches what a call needs."""
    if spec.split:
        return "fa4core.sm100.forward.combine:forward_and_combine"
    return "fa4core.sm100.forward.kernel:forward"


def workspaces(call: Call, spec: Spec, out: Shape, rows: Shape) -> tuple[Shape, ...]:
    """Shapes of float32 tensors behind row_max: output, LSE and row maximum of each share."""
    if not spec.split:
        return ()
    n = splits_of(call)
    return tuple((n * shape[0], *shape[1:]) for shape in (out, rows, rows))


def metadata_of(call: Call, spec: Spec, place: Place, device: torch.device) -> Metadata:
    """The plan of a call; see `Metadata` for what else may use it."""
    problem = call.problem
    if spec.packed > 1:  # the tile map is another one then
        problem, tiles = packed(call.program, problem, spec.packed)
    else:
        assert isinstance(call.tiles, TileMap)
        tiles = call.tiles
    return metadata(problem, tiles, spec.side, schedule_of(call), place, device)


def before(call: Call, place: Place) -> tuple[Kernel, ...]:
    """The kernels that `metadata_of` launches."""
    return (pre_pass(place),) if schedule_of(call).order == "batch_sorted" else ()


def run_time(call: Call, spec: Spec, place: Place, plan: Metadata) -> tuple | None:
    """The kernel's arguments after row_max, as `kernel.forward` lists them; None: no work."""
    if not len(plan):
        return None
    clusters = len(plan)
    if schedule_of(call).source == "persistent":
        clusters = min(max(1, place.sms // spec.ctas), clusters)
    return (
        plan.items,
        plan.runs,
        _page_table(call),
        captured(call.program.graph.captures),
        float(call.scale),
        clusters * spec.ctas,
    )


FORWARD = Skeleton(spec_of, host_function, workspaces, metadata_of, before, run_time)


def _page_table(call: Call) -> Tensor:
    """(batch, pages) int32, at least one column; without pages nothing reads it."""
    if call.layout is None or call.layout.page_table is None:
        return torch.zeros(1, 1, dtype=torch.int32)
    table = call.layout.page_table.to(torch.int32)
    return table.contiguous() if table.numel() else table.new_zeros(len(table), 1)
