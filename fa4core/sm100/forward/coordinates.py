"""Coordinate maps on the host: what a work tile stands for, and its tile map."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from fa4core.plan.groups import group_map
from fa4core.plan.problem import Problem
from fa4core.plan.tiles import TileMap
from fa4core.program import Program
from fa4core.sm100.forward.spec import TILE
from fa4core.sm100.forward.work import FIELDS, RUN_FIELDS, Item


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


def shares(
    items: torch.Tensor, runs: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plan (`tables`) with the blocks of every work tile shared among `count` work tiles.

    Shares differ by one block at most; some are empty where there are fewer blocks than shares.
    """
    field = {f.name: i for i, f in enumerate(attrs.fields(Item))}
    given, of = items.numpy(), runs.numpy()
    found = np.repeat(given, count, axis=0).reshape(len(given), count, FIELDS)
    cut: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
    rows: list[np.ndarray] = [np.zeros((0, RUN_FIELDS), np.int32)]
    total = 0
    for i, item in enumerate(given):
        key = int(item[field["first_run"]]), int(item[field["end_run"]])
        if key not in cut:
            parts = _cut(of[slice(*key)], count)
            ends = total + np.cumsum([0, *map(len, parts)])
            cut[key] = ends, np.array([(p[:, 1] - p[:, 0]).sum() for p in parts])
            rows += parts
            total = ends[-1]
        ends, blocks = cut[key]
        found[i, :, field["first_run"]], found[i, :, field["end_run"]] = ends[:-1], ends[1:]
        found[i, :, field["blocks"]] = blocks
        found[i, :, field["share"]] = np.arange(count)
    return (
        torch.from_numpy(found.reshape(-1, FIELDS)),
        torch.from_numpy(np.concatenate(rows if total else [*rows, of[:1]])),
    )


def _cut(runs: np.ndarray, count: int) -> list[np.ndarray]:
    """Runs (n, 3) cut into `count` consecutive parts of equally many blocks."""
    length = runs[:, 1] - runs[:, 0]
    before = np.cumsum(length) - length
    parts = []
    for share in range(count):
        first, end = (length.sum() * (share + i) // count for i in range(2))
        part = runs.copy()
        part[:, 0] = runs[:, 0] + np.clip(first - before, 0, length)
        part[:, 1] = runs[:, 0] + np.clip(end - before, 0, length)
        parts.append(part[part[:, 0] < part[:, 1]])
    return parts
