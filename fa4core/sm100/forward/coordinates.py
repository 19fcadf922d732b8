"""Coordinate maps on the host: what a work tile stands for, and its tile map."""

from __future__ import annotations

import attrs

from fa4core.plan.groups import group_map
from fa4core.plan.problem import Problem
from fa4core.plan.tiles import TileMap
from fa4core.program import Program
from fa4core.sm100.forward.spec import TILE


def packing(program: Program, problem: Problem) -> int:
    """Query heads in the rows of a tile: the whole group, or the largest part of it that fits."""
    if program.schedule is None or program.schedule.coordinates != "packed_gqa":
        return 1
    group = problem.group
    return next(n for n in range(min(group, TILE), 0, -1) if group % n == 0)


def packed(program: Program, problem: Problem, heads: int) -> tuple[Problem, TileMap]:
    """The problem whose query heads are groups of `heads` heads, and its tile map."""
    tiles = group_map(
        program.graph.mask,
        heads,
        batch=problem.batch,
        heads=problem.heads_q,
        seqlens_q=problem.seqlens_q,
        seqlens_k=problem.seqlens_k,
        tile_q=TILE // heads,
        tile_k=TILE,
    )
    return attrs.evolve(problem, heads_q=problem.heads_q // heads), tiles
