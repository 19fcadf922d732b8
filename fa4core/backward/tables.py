"""The plan of a backward pass, made on the host: work tiles of keys, and their runs of query tiles.

Made from the forward map by `TileMap.transpose`. The runs of a KV head are those of its query
heads, one head behind the other; KV heads whose query heads have the same maps share them.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch

from fa4core.backward.joined import joined, with_turns
from fa4core.backward.rows import Rows
from fa4core.backward.work import Item, Run
from fa4core.forward.tables import at_least_one, columns_of, stacked, work_tiles
from fa4core.plan.makespan import arrange, kv_heads_in_section
from fa4core.plan.problem import Problem
from fa4core.plan.target import SM100, Target
from fa4core.plan.tiles import TileMap
from primitives.schedule import Schedule


def tables(
    problem: Problem,
    tiles: TileMap,
    side: int,
    schedule: Schedule,
    deterministic: bool = False,
    target: Target = SM100,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plan of a problem: items (n, fields) and runs (m, 6), int32; see `work`.

    Args:
        problem: Sizes.
        tiles: The mask's tile map, of query tiles and key tiles as the kernel has them.
        side: Key tiles of a work tile.
        schedule: Its order and L2 sections; time is counted in query tiles.
        deterministic: Whether runs say whose turn it is to add to dQ. The order of work tiles is
            then that of turns, so that whoever is waited for has begun before.
        target: Whose L2 cache.
    """
    across = tiles.transpose()
    first, runs = across.side_by_side(side, cut_rows=True)
    count = -(-np.array([across.tiles_q(b) for b in range(across.batch)], np.int64) // side)
    first, found = joined(first, runs, count, problem.group)
    work, row = work_tiles(across, side, first, found.runs)
    sections = kv_heads_in_section(target.measured.l2_bytes, _bytes_of_head(problem))
    if deterministic:  # as in `with_turns`: the last tile of keys first
        found = with_turns(found)
        in_order = attrs.evolve(schedule, order="in_order", l2_sections=True)
        order = arrange(attrs.evolve(work, index=-work.index), in_order, sections)
    else:
        order = arrange(work, schedule, sections)
    runs = found.runs
    h_kv = work.head[order]
    columns = columns_of(problem, work, order, row, runs, h_kv)
    starts = Rows(problem, tiles.tile_q).starts[columns["b"]]
    listed = Run(runs.start, runs.end, runs.kind, found.head, found.turn, found.step)
    return (
        stacked(Item(**columns, h=h_kv * problem.group, rows_q=starts)),
        at_least_one(stacked(listed)),
    )


def _bytes_of_head(problem: Problem) -> np.ndarray:
    """(batch,) what all key tiles of a KV head read or add to: Q, dO and dQ of its query heads."""
    of_row = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize + 4 * problem.head_dim
    return np.asarray(problem.seqlens_q, np.int64) * (of_row * problem.group)
