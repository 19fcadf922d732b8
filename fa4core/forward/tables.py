"""The plan of a problem, made on the host: work tiles in their order, and their runs of key tiles.

Vectorised over tiles; runs are found once for each distinct map and shared by the heads and batch
entries that have it. Launches use it, with a `TileMap` of whatever a row of tiles stands for.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from fa4core.forward.work import Item, Run
from fa4core.plan.makespan import WorkTiles, arrange, kv_heads_in_section
from fa4core.plan.problem import Problem
from fa4core.plan.runs import Runs
from fa4core.plan.target import SM100, Target
from fa4core.plan.tiles import TileMap
from primitives.schedule import Schedule


def tables(
    problem: Problem,
    tiles: TileMap,
    side: int,
    schedule: Schedule,
    target: Target = SM100,
    batch_rank: np.ndarray | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plan of a problem: items (n, fields) and runs (m, 3), int32.

    Args:
        problem: Sizes.
        tiles: The mask's tile map.
        side: Query tiles of a work tile.
        schedule: Its order and L2 sections; time is counted in key blocks.
        target: Whose L2 cache.
        batch_rank: The place of each sequence in a batch-sorted order; found here if not given.
    """
    first, runs = tiles.side_by_side(side)
    work, row = work_tiles(tiles, side, first, runs, problem.group)
    bytes_of_head = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    sections = kv_heads_in_section(
        target.measured.l2_bytes, np.asarray(problem.seqlens_k, np.int64) * bytes_of_head
    )
    order = arrange(work, schedule, sections, batch_rank)
    h = work.head[order]
    items = Item(**columns_of(problem, work, order, row, runs, h // problem.group), h=h)
    return stacked(items), at_least_one(stacked(_steps(runs)))


def _steps(runs: Runs) -> Run:
    """Each row's runs from the last to the first, as steps; see `key_tile`."""
    length = np.diff(runs.pointer)
    behind = np.repeat(runs.pointer[:-1] + runs.pointer[1:] - 1, length)
    turned = behind - np.arange(len(runs.start))
    return Run(1 - runs.end[turned], 1 - runs.start[turned], runs.kind[turned])


def work_tiles(
    tiles: TileMap, side: int, first: np.ndarray, runs: Runs, group: int = 1
) -> tuple[WorkTiles, np.ndarray]:
    """Work tiles in natural order, and the row of runs that each has.

    Args:
        tiles: Says how many rows of tiles there are.
        side: Rows of a work tile.
        first: (batch, heads) the first row of runs of each; work tiles have these heads.
        runs: Of all rows.
        group: Heads that share a KV head.
    """
    heads = first.shape[1]
    groups = -(-np.array([tiles.tiles_q(b) for b in range(tiles.batch)], np.int64) // side)
    count = np.repeat(groups, heads)
    pair = np.repeat(np.arange(len(count)), count)
    index = np.arange(len(pair)) - (np.cumsum(count) - count)[pair]
    row = first.reshape(-1)[pair] + index
    visited = np.concatenate([[0], np.cumsum(runs.end - runs.start, dtype=np.int64)])
    blocks = visited[runs.pointer[row + 1]] - visited[runs.pointer[row]]
    sequence, head = pair // max(1, heads), pair % max(1, heads)
    return WorkTiles(sequence, head, index, blocks, blocks, group), row


def columns_of(
    problem: Problem,
    work: WorkTiles,
    order: np.ndarray,
    row: np.ndarray,
    runs: Runs,
    h_kv: np.ndarray,
) -> dict[str, Any]:
    """What every work tile has, in the order in which they are handed out."""
    b, row = work.sequence[order], row[order]
    zero = np.zeros(problem.batch, np.int64)
    starts_q = zero if problem.starts_q is None else np.asarray(problem.starts_q)
    starts_k = zero if problem.starts_k is None else np.asarray(problem.starts_k)
    return {
        "b": b,
        "b_q": b if problem.starts_q is None else 0,
        "b_k": b if problem.starts_k is None else 0,
        "h_kv": h_kv,
        "tile": work.index[order],
        "first_run": runs.pointer[row],
        "end_run": runs.pointer[row + 1],
        "blocks": work.blocks[order],
        "seqlen_q": np.asarray(problem.seqlens_q, np.int64)[b],
        "seqlen_k": np.asarray(problem.seqlens_k, np.int64)[b],
        "start_q": starts_q[b],
        "start_k": starts_k[b],
    }


def stacked(columns: Any) -> torch.Tensor:
    """(n, fields) int32 of a value with an array for each field, or a number for all rows."""
    arrays = np.broadcast_arrays(*(np.atleast_1d(c) for c in attrs.astuple(columns)))
    return torch.from_numpy(np.stack(arrays, axis=1).astype(np.int32))


def at_least_one(rows: torch.Tensor) -> torch.Tensor:
    """A table of runs, so that there is something to pass."""
    return rows if len(rows) else rows.new_zeros(1, rows.shape[1])
