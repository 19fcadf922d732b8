"""Static lists of work tiles: every tile in one list, and dealt as list scheduling deals them."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa4core.forward.lists import BLOCKS, TILE, dealt, every_nth, listed
from fa4core.forward.work import FIELDS, Item
from fa4core.plan.makespan import loads

NUMBER = [f.name for f in attrs.fields(Item)].index("tile")


def items_of(blocks: list[int]) -> torch.Tensor:
    items = torch.zeros(len(blocks), FIELDS, dtype=torch.int32)
    items[:, BLOCKS] = torch.tensor(blocks, dtype=torch.int32)
    items[:, NUMBER] = torch.arange(len(blocks), dtype=torch.int32)
    return items


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 9))
def test_tiles_are_dealt_to_whoever_is_done_first(blocks: list[int], ctas: int) -> None:
    owner = dealt(items_of(blocks), ctas)
    costs = np.array(blocks, dtype=float) + TILE
    found = np.bincount(owner, weights=costs, minlength=ctas)
    assert sorted(found) == sorted(loads(costs, ctas, "dynamic"))


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 9))
def test_lists_have_each_tile_once_and_in_order(blocks: list[int], ctas: int) -> None:
    ctas = min(ctas, len(blocks))
    items = items_of(blocks)
    for owner in (dealt(items, ctas), every_nth(len(blocks), max(1, ctas))):
        order, begins = listed(owner)
        found = items[order]
        assert sorted(found[:, NUMBER].tolist()) == list(range(len(blocks)))
        assert begins[-1] == len(blocks)
        for cta in range(ctas):
            mine = [i for i, of in enumerate(owner) if of == cta]
            assert mine
            assert found[begins[cta] : begins[cta + 1], NUMBER].tolist() == mine


@pytest.mark.parametrize("count", [31, 32, 64])
def test_a_causal_problem_is_balanced(count: int) -> None:
    """Every n-th tile gives the CTAs that get the longest tile of each round much more."""
    blocks = [b for b in range(count, 0, -1) for _ in range(16)]
    owner = dealt(items_of(blocks), 13)
    costs = np.bincount(owner, weights=np.array(blocks) + float(TILE))
    assert costs.max() <= 1.01 * costs.mean()
    in_turns = np.bincount(every_nth(len(blocks), 13), weights=np.array(blocks) + float(TILE))
    assert in_turns.max() > costs.max()
