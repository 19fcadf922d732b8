"""The backward plan that the roles read, against the tile maps that it is made from."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch

from fa4core.backward.rows import Rows
from fa4core.backward.tables import tables
from fa4core.backward.work import Item, Plan, Run
from fa4core.plan.problem import Problem
from fa4core.plan.tiles import EMPTY, FULL, PARTIAL, TileMap, tile_map
from primitives import mask
from primitives.schedule import Schedule

QUERIES, KEYS = 64, 128
LENGTHS = (700, 0, 256, 100), (600, 300, 512, 0)
PER_HEAD = torch.tensor([50, 100, 200, 400])


@mask.define
def windows(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx).abs() < PER_HEAD[h]


@mask.define
def scattered(b, h, q_idx, kv_idx):
    return (q_idx // 64 * 5 + kv_idx // 128 * 3 + h) % 4 < 2


MASKS = {
    "full": mask.full(),
    "causal": mask.causal(),
    "window": mask.sliding_window(200, 0),
    "none": mask.full() & ~mask.full(),
    "by head": windows,
    "scattered": scattered,
}


def made(name: str, side: int, deterministic: bool) -> tuple[TileMap, list[Item], list[Run]]:
    problem = Problem(4, 4, 2, 64, 64, *LENGTHS)
    tiles = tile_map(
        MASKS[name].expr,
        batch=4,
        heads=4,
        seqlens_q=LENGTHS[0],
        seqlens_k=LENGTHS[1],
        tile_q=QUERIES,
        tile_k=KEYS,
    )
    items, runs = tables(problem, tiles, side, Schedule(), deterministic)
    return tiles, [Item(*r) for r in items.tolist()], [Run(*r) for r in runs.tolist()]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("side", [1, 2])
@pytest.mark.parametrize("name", MASKS)
def test_runs_cover_what_the_maps_visit(name: str, side: int, deterministic: bool) -> None:
    """Every pair that the mask needs is visited once for each query head, and what is FULL is full
    and inside the problem on both sides."""
    tiles, items, runs = made(name, side, deterministic)
    seen = set()
    for item in items:
        seen.add((item.b, item.h_kv, item.tile))
        assert item.h == 2 * item.h_kv
        visits = 0
        for head in range(2):
            expected = tiles.dense(item.b, item.h + head).T
            found = np.zeros((side, expected.shape[1]), int)
            for run in runs[item.first_run : item.end_run]:
                if run.head == head:
                    assert (found[:, run.first : run.end] == EMPTY).all()
                    visits += run.end - run.first
                    for t in range(side):
                        found[t, run.first : run.end] = run.kinds >> (2 * t) & 3
            for t in range(side):
                key = item.tile * side + t
                if key * KEYS >= item.seqlen_k:  # fills up a pair; its mask is false
                    assert (found[t] != FULL).all()
                    continue
                assert (found[t][expected[key] != EMPTY] != EMPTY).all()
                assert (expected[key][found[t] == FULL] == FULL).all()
                assert (found[t][(expected[key] == EMPTY) & (found[t] != EMPTY)] == PARTIAL).all()
                if item.seqlen_q % QUERIES:
                    assert (found[t][-1:] != FULL).all()
                if (key + 1) * KEYS > item.seqlen_k:
                    assert (found[t] != FULL).all()
        assert item.blocks == visits
    assert seen == {
        (b, h, t)
        for b in range(4)
        for h in range(2)
        for t in range(-(-LENGTHS[1][b] // (KEYS * side)))
    }
    assert len(seen) == len(items)


@pytest.mark.parametrize("side", [1, 2])
@pytest.mark.parametrize("name", MASKS)
def test_turns_count_those_before_in_the_list(name: str, side: int) -> None:
    """Every query tile is added to in the order of work tiles: a CTA waits for earlier ones only,
    and one that doesn't visit a tile has no turn."""
    _, items, runs = made(name, side, deterministic=True)
    turns = defaultdict(list)
    for item in items:
        for run in runs[item.first_run : item.end_run]:
            for i in range(run.first, run.end):
                turns[item.b, item.h + run.head, i].append(Plan.turn(run, i))
    assert turns or name == "none"
    assert all(found == list(range(len(found))) for found in turns.values())


def test_a_causal_mask_makes_nobody_wait_at_the_diagonal() -> None:
    _, items, runs = made("causal", 1, deterministic=True)
    first = [runs[i.first_run] for i in items if i.b == 0]
    assert first and all(Plan.turn(run, run.first) == 0 for run in first)


def test_rows_are_whole_tiles_one_sequence_behind_the_other() -> None:
    padded = Rows(Problem(4, 2, 1, 64, 64, *LENGTHS), QUERIES)
    assert padded.starts.tolist() == [0, 704, 704, 960]
    assert padded.count == 1088
    table = padded.table()
    assert len(table) == 17
    assert table[10].tolist() == [0, 640, 60]
    assert table[-1].tolist() == [3, 64, 36]
    packed = Problem(2, 2, 1, 64, 64, (70, 3), (70, 3), (5, 90), (0, 70))
    assert Rows(packed, 64).table().tolist() == [[0, 5, 64], [0, 69, 6], [0, 90, 3]]
