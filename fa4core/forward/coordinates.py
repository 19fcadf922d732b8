"""Coordinate maps on the host: what a work tile stands for, and its tile map."""

from __future__ import annotations

import attrs

from fa4core.forward.spec import ForwardSpec
from fa4core.plan.groups import group_map
from fa4core.plan.problem import Problem
from fa4core.plan.tiles import TileMap
from fa4core.program import Program


def packing(program: Program, problem: Problem, rows: int) -> int:
    """Query heads in the rows of a tile: the whole group, or the largest part of it that fits."""
    if program.schedule is None or program.schedule.coordinates != "packed_gqa":
        return 1
    group = problem.group
    return next(n for n in range(min(group, rows), 0, -1) if group % n == 0)


def packed(program: Program, problem: Problem, spec: ForwardSpec) -> tuple[Problem, TileMap]:
    """The problem whose query heads are groups of packed ones, and the kernel's tile map of it."""
    tiles = group_map(
        program.graph.mask,
        spec.packed,
        batch=problem.batch,
        heads=problem.heads_q,
        seqlens_q=problem.seqlens_q,
        seqlens_k=problem.seqlens_k,
        tile_q=spec.queries,
        tile_k=spec.block,
    )
    return attrs.evolve(problem, heads_q=problem.heads_q // spec.packed), tiles
