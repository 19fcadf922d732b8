"""What a call's Hopper forward kernel is compiled for, and what it takes at run time.

`fa4core.prepared` does the rest. It imports no DSL.
"""

from __future__ import annotations

from typing import Any

import attrs

from fa4core.plan.problem import Problem
from fa4core.plan.target import target as planned
from fa4core.plan.tiles import TileMap, tile_map
from fa4core.prepared import Skeleton
from fa4core.program import Program
from fa4core.reference.tiled import Call
from fa4core.sm90.forward.spec import ROWS, Spec
from fa4core.sm90.forward.tuning import Shape, shape_of
from fa4core.sm100.forward.launch import _captured, schedule_of
from fa4core.sm100.forward.tables import tables


def spec_of(call: Call, target: str, shape: Shape | None = None) -> Spec:
    """What a call's kernel is compiled for; `shape` instead of the tuned one."""
    problem, program = call.problem, call.program
    threshold = program.rescale_threshold
    rows = max(problem.seqlens_q, default=0)
    return Spec(
        graph=program.graph.dump(),
        dtype=str(problem.dtype).removeprefix("torch."),
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        shape=shape or shape_of(problem.head_dim, problem.head_dim_v, rows),
        exp=call.exp,
        threshold=planned(target).rescale_threshold if threshold is None else float(threshold),
        negative_scale=call.scale <= 0,
        target=target,
    )


def run_time(call: Call, spec: Spec, sms: int) -> tuple | None:
    """The kernel's arguments after row_max, as `kernel.forward` lists them; None: no work."""
    schedule = schedule_of(call)
    tiles = _tiles(call.program, call.problem, spec)
    items, runs = tables(call.problem, tiles, spec.tiles, schedule, planned(spec.target))
    if not len(items):
        return None
    captured = tuple(_captured(c.tensor) for c in call.program.graph.captures)
    ctas = min(sms, len(items)) if schedule.source == "persistent" else len(items)
    return items, runs, captured, float(call.scale), ctas


def _tiles(program: Program, problem: Problem, spec: Spec) -> TileMap:
    """The mask's tile map, in the kernel's tiles."""
    return tile_map(
        program.graph.mask,
        batch=problem.batch,
        heads=problem.heads_q,
        seqlens_q=problem.seqlens_q,
        seqlens_k=problem.seqlens_k,
        tile_q=ROWS,
        tile_k=spec.keys,
    )


FORWARD = Skeleton("fa4core.sm90.forward.kernel:forward", spec_of, run_time)


def shaped(shape: Shape, **changes: Any) -> Skeleton:
    """The skeleton with another shape than the tuned one, and other changes of its spec: for tests
    and tuning."""

    def changed(call: Call, target: str) -> Spec:
        return attrs.evolve(spec_of(call, target, shape), **changes)

    return attrs.evolve(FORWARD, spec_of=changed)
