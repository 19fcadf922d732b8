"""What a call's Hopper forward kernel is compiled for, and what it takes at run time.

`fa4core.prepared` does the rest. It imports no DSL.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from fa4core.compile.kernel import Kernel
from fa4core.forward.arguments import captured, compiled_for, of_shares, pages
from fa4core.forward.coordinates import packed, packing
from fa4core.forward.metadata import Metadata, metadata, pre_pass
from fa4core.places import Place
from fa4core.plan.tiles import TileMap
from fa4core.prepared import Skeleton
from fa4core.reference.tiled import Call
from fa4core.sm90.forward.spec import ROWS, Spec
from fa4core.sm90.forward.tuning import FEW, LONG, MANY, Shape, fitting, shapes_of
from primitives.expr import algebra
from primitives.schedule import Schedule


def spec_of(call: Call, target: str, shape: Shape | None = None) -> Spec:
    """What a call's kernel is compiled for; `shape` instead of the tuned one."""
    shape, schedule = shape or _shape(call), schedule_of(call)
    return Spec(**compiled_for(call, target, schedule, ROWS, shape.keys), shape=shape)


def _shape(call: Call) -> Shape:
    problem, graph = call.problem, call.program.graph
    shapes = shapes_of(problem.head_dim, problem.head_dim_v)
    shape = shapes.masked
    # what masked kernels have has the larger divisors in common with pages
    long = max(problem.seqlens_k, default=0) >= LONG
    if graph.mask.is_const and problem.page_size is None and long:
        shape = shapes.everything
    elif shapes.narrow is not None and _is_narrow(call):
        shape = shapes.narrow
    elif shapes.modified is not None and graph.score is not algebra.var("score"):
        shape = shapes.modified
    rows = max(problem.seqlens_q, default=0) * packing(call.program, problem, ROWS)
    return fitting(shape, rows)


def _is_narrow(call: Call) -> bool:
    """Whether query tiles visit few of many key tiles, on average."""
    if max(call.problem.seqlens_k, default=0) < MANY * call.tile_k:
        return False
    assert isinstance(call.tiles, TileMap)
    visited = call.tiles.lengths()
    return visited.sum() <= FEW * len(visited)


def host_function(spec: Spec) -> str:
    """The host function that launches what a call needs."""
    return f"fa4core.sm90.forward.kernel:forward{'_and_combine' if spec.split else ''}"


def metadata_of(call: Call, spec: Spec, place: Place, device: torch.device) -> Metadata:
    """The plan of a call; see `Metadata` for what else may use it."""
    problem, tiles = packed(call.program, call.problem, spec)
    schedule = schedule_of(call)
    return metadata(problem, tiles, spec.tiles, schedule, place, device, dealing=True)


def before(call: Call, place: Place) -> tuple[Kernel, ...]:
    """The kernels that `metadata_of` launches."""
    return (pre_pass(place),) if schedule_of(call).order == "batch_sorted" else ()


def schedule_of(call: Call) -> Schedule:
    """The variant's choice, or the default."""
    return call.program.schedule or Schedule()


def run_time(call: Call, spec: Spec, place: Place, plan: Metadata) -> tuple | None:
    """The kernel's arguments after row_max, as `kernel.forward` lists them; None: no work."""
    if not len(plan):
        return None
    assert plan.lists is not None
    arguments = pages(call), captured(call.program.graph.captures)
    tables = plan.items, plan.runs, plan.lists
    return tables, *arguments, float(call.scale), len(plan.lists) - 1


FORWARD = Skeleton(
    spec_of,
    host_function,
    lambda call, spec, out, rows: of_shares(schedule_of(call).num_splits, out, rows),
    metadata_of,
    before,
    run_time,
    lean=lambda spec: attrs.evolve(spec, row_max=False),
)


def shaped(shape: Shape, **changes: Any) -> Skeleton:
    """The skeleton with another shape than the tuned one, and other changes of its spec: for tests
    and tuning."""

    def changed(call: Call, target: str) -> Spec:
        return attrs.evolve(spec_of(call, target, shape), **changes)

    return attrs.evolve(FORWARD, spec_of=changed)
