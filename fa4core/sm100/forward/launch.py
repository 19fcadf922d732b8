"""What a call's SM100 forward kernel is compiled for, and what it takes at run time.

The two functions to extend for a new choice: `spec_of` for what changes the code, `run_time` for
what changes from call to call. `fa4core.prepared` does the rest. It imports no DSL.
"""

from __future__ import annotations

import torch

from fa4core.compile.kernel import Kernel
from fa4core.forward.arguments import captured, compiled_for, of_shares, pages
from fa4core.forward.coordinates import packed
from fa4core.forward.metadata import Metadata, metadata, pre_pass
from fa4core.places import Place
from fa4core.plan.choose import choose
from fa4core.plan.target import SM100
from fa4core.plan.target import target as planned
from fa4core.plan.tiles import TileMap
from fa4core.prepared import Shape, Skeleton
from fa4core.reference.tiled import Call
from fa4core.sm100.forward.spec import TILE, Spec
from primitives.schedule import Schedule


def spec_of(call: Call, target: str) -> Spec:
    """What a call's kernel is compiled for."""
    problem, schedule = call.problem, schedule_of(call)
    common = compiled_for(call, target, schedule, TILE, TILE)
    shape = planned(target).forward_tile(problem.head_dim, problem.head_dim_v)
    several = max(problem.seqlens_q, default=0) > TILE // common["packed"] * schedule.ctas
    return Spec(
        **common,
        tiles=shape.stages if several else 1,
        ctas=schedule.ctas,
        dynamic=schedule.source == "dynamic",
    )


def schedule_of(call: Call) -> Schedule:
    """The variant's choice, or what `choose` says."""
    if call.program.schedule is not None:
        return call.program.schedule
    assert isinstance(call.tiles, TileMap)
    return choose(call.problem, call.tiles, SM100)


def host_function(spec: Spec) -> str:
    """The host function that launches what a call needs."""
    return f"fa4core.sm100.forward.kernel:forward{'_and_combine' if spec.split else ''}"


def workspaces(call: Call, spec: Spec, out: Shape, rows: Shape) -> tuple[Shape, ...]:
    """Shapes of float32 tensors behind row_max."""
    return of_shares(schedule_of(call).num_splits, out, rows)


def metadata_of(call: Call, spec: Spec, place: Place, device: torch.device) -> Metadata:
    """The plan of a call; see `Metadata` for what else may use it."""
    problem = call.problem
    if spec.packed > 1:  # the tile map is another one then
        problem, tiles = packed(call.program, problem, spec)
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
        (plan.items, plan.runs),
        pages(call),
        captured(call.program.graph.captures),
        float(call.scale),
        clusters * spec.ctas,
    )


FORWARD = Skeleton(spec_of, host_function, workspaces, metadata_of, before, run_time)
