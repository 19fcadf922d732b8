"""The plan that the roles read, against the tile maps that it is made from."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from fa4core.forward.tables import tables
from fa4core.forward.work import Item, Run, key_tile
from fa4core.plan.problem import Problem
from fa4core.plan.tiles import EMPTY, FULL, PARTIAL, tile_map
from primitives import mask
from primitives.schedule import Schedule

MASKS = {
    "full": mask.full(),
    "causal": mask.causal(),
    "window": mask.sliding_window(200, 0),
    "none": mask.full() & ~mask.full(),
}


@pytest.mark.parametrize("side", [1, 2, 4])
@pytest.mark.parametrize("name", MASKS)
def test_runs_cover_what_the_maps_visit(name: str, side: int) -> None:
    lengths = (700, 0, 256), (600, 300, 512)
    problem = Problem(3, 2, 1, 64, 64, *lengths)
    tiles = tile_map(MASKS[name].expr, batch=3, heads=2, seqlens_q=lengths[0], seqlens_k=lengths[1])
    items, runs = tables(problem, tiles, side, Schedule())
    seen = set()
    for row in items.tolist():
        item = Item(*row)
        seen.add((item.b, item.h, item.tile))
        dense = np.zeros((side, tiles.tiles_k(item.b)), int)
        for run in (Run(*r) for r in runs[item.first_run : item.end_run].tolist()):
            for t in range(side):
                for step in range(run.first, run.end):
                    dense[t, key_tile(step)] = run.kinds >> (2 * t) & 3
        assert item.blocks == (dense[0] != EMPTY).sum()
        for t in range(side):
            query = item.tile * side + t
            if query < tiles.tiles_q(item.b):
                expected = tiles.dense(item.b, item.h)[query]
                assert (dense[t][expected != EMPTY] != EMPTY).all()
                assert (expected[dense[t] == FULL] == FULL).all()
                assert (dense[t][(expected == EMPTY) & (dense[t] != EMPTY)] == PARTIAL).all()
            if lengths[1][item.b] % 128:
                assert (dense[t][-1:] != FULL).all()
    every = {
        (b, h, i) for b in range(3) for h in range(2) for i in range(-(-tiles.tiles_q(b) // side))
    }
    assert seen == every


def test_order_is_by_the_number_of_blocks() -> None:
    problem = Problem(1, 1, 1, 64, 64, (1024,), (1024,))
    tiles = tile_map(mask.causal().expr, batch=1, heads=1, seqlens_q=(1024,), seqlens_k=(1024,))
    column = [f.name for f in attrs.fields(Item)].index("blocks")
    for order, expected in (
        ("in_order", [2, 4, 6, 8]),
        ("longest_first", [8, 6, 4, 2]),
        ("shortest_first", [2, 4, 6, 8]),
    ):
        items, _ = tables(problem, tiles, 2, Schedule(order=order))
        assert items[:, column].tolist() == expected
