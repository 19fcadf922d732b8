"""The vectorised tables against the same, written as plain loops, on random maps."""

from __future__ import annotations

import itertools

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4core.forward.tables import tables
from fa4core.forward.work import Item
from fa4core.plan.makespan import kv_heads_in_section
from fa4core.plan.problem import Problem
from fa4core.plan.runs import assemble
from fa4core.plan.target import SM100
from fa4core.plan.tiles import EMPTY, FULL, PARTIAL, TileMap
from primitives.schedule import Schedule

TILE = 128


@st.composite
def problems(draw) -> tuple[Problem, TileMap]:
    """A problem with random kinds for each of a few maps; heads and sequences share some."""
    lengths = st.sampled_from([0, 1, 127, 128, 129, 300, 512, 700])
    pairs = draw(st.lists(st.tuples(lengths, lengths), min_size=1, max_size=4))
    batch, group, heads_kv = len(pairs), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    heads = group * heads_kv
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, first_row, known = [], [0], {}
    stored = np.zeros((batch, heads), int)
    for b, h in itertools.product(range(batch), range(heads)):
        key = (*pairs[b], int(rng.integers(2)))  # which of two maps for these lengths
        if key not in known:
            known[key] = len(first_row) - 1
            shape = (-(-pairs[b][0] // TILE), -(-pairs[b][1] // TILE))
            kinds = rng.integers(0, 3, shape) * (rng.random(shape) < rng.random())
            row, column = np.nonzero(kinds)
            rows.append((row + first_row[-1], column, column + 1, kinds[row, column]))
            first_row.append(first_row[-1] + shape[0])
        stored[b, h] = known[key]
    columns = [np.concatenate(c) for c in zip(*rows, strict=True)]
    seqlens_q, seqlens_k = zip(*pairs, strict=True)
    tiles = TileMap(
        batch, heads, TILE, TILE, seqlens_q, seqlens_k, stored, np.array(first_row),
        assemble(*columns, first_row[-1]),
    )  # fmt: skip
    starts = [None, None]
    for i, of in enumerate((seqlens_q, seqlens_k)):
        if draw(st.booleans()):
            starts[i] = tuple(np.cumsum([3, *of])[:-1].tolist())
    return Problem(batch, heads, heads_kv, 64, 64, seqlens_q, seqlens_k, *starts), tiles


def runs_of(tiles: TileMap, b: int, h: int, tile: int, side: int) -> list[tuple[int, int, int]]:
    """What `TileMap.side_by_side` says about one group of query tiles, as steps (`key_tile`)."""
    columns = tiles.tiles_k(b)
    kinds = np.full((side, columns), FULL)
    exist = range(min(side, tiles.tiles_q(b) - tile * side))
    for t in exist:
        kinds[t] = tiles.dense(b, h)[tile * side + t]
    visited = (kinds[: len(exist)] != EMPTY).any(0)
    kinds[kinds == EMPTY] = PARTIAL
    if tiles.seqlens_k[b] % TILE and columns:
        kinds[:, -1] = PARTIAL
    runs: list[tuple[int, int, int]] = []
    for j in np.flatnonzero(visited).tolist():
        packed = sum(int(kinds[t, j]) << 2 * t for t in range(side))
        if runs and runs[-1][1:] == (j, packed):
            runs[-1] = (runs[-1][0], j + 1, packed)
        else:
            runs.append((j, j + 1, packed))
    return [(1 - end, 1 - first, kinds) for first, end, kinds in reversed(runs)]


def ordered(items: list[Item], problem: Problem, schedule: Schedule) -> list[Item]:
    """The items in the schedule's order, by sorting with a key that says it in words."""
    longest: dict[int, int] = {}
    for item in items:
        longest[item.b] = max(longest.get(item.b, 0), item.blocks)

    def key(item: Item) -> tuple:
        of_sequence = item.b
        if schedule.order == "batch_sorted":
            of_sequence = (-longest[item.b], item.b)
        time = {"in_order": 0, "shortest_first": item.blocks}.get(schedule.order, -item.blocks)
        if schedule.l2_sections:
            head = problem.seqlens_k[item.b] * 128 * 2
            section = item.h_kv // int(kv_heads_in_section(SM100.measured.l2_bytes, [head])[0])
            place = item.tile if schedule.order == "in_order" else time
            return (of_sequence, section, place, item.h, item.tile)
        if schedule.order == "in_order":
            return (item.b, item.h, item.tile)
        if schedule.order == "batch_sorted":
            return (of_sequence, time, item.h, item.tile)
        return (time, item.b, item.h, item.tile)

    return sorted(items, key=key)


@settings(max_examples=60, deadline=None)
@given(problems(), st.sampled_from([1, 2, 4]), st.booleans(), st.data())
def test_tables_are_what_plain_loops_make(given_problem, side, sections, data) -> None:
    problem, tiles = given_problem
    order = data.draw(
        st.sampled_from(["in_order", "longest_first", "shortest_first", "batch_sorted"])
    )
    schedule = Schedule(order=order, l2_sections=sections)
    found, runs = tables(problem, tiles, side, schedule)
    visits = {}
    expected = []
    for b in range(problem.batch):
        for h in range(problem.heads_q):
            for tile in range(-(-tiles.tiles_q(b) // side)):
                visits[b, h, tile] = runs_of(tiles, b, h, tile, side)
                packed_q, packed_k = problem.starts_q is not None, problem.starts_k is not None
                expected.append(
                    Item(
                        b=b, h=h, b_q=0 if packed_q else b, b_k=0 if packed_k else b,
                        h_kv=h // problem.group, tile=tile, first_run=None, end_run=None,
                        blocks=sum(end - first for first, end, _ in visits[b, h, tile]),
                        seqlen_q=problem.seqlens_q[b], seqlen_k=problem.seqlens_k[b],
                        start_q=problem.starts_q[b] if packed_q else 0,
                        start_k=problem.starts_k[b] if packed_k else 0,
                    )
                )  # fmt: skip
    items = [Item(*row) for row in found.tolist()]
    for item in items:
        mine = [tuple(r) for r in runs[item.first_run : item.end_run].tolist()]
        assert mine == visits[item.b, item.h, item.tile]
    bare = [attrs.evolve(i, first_run=None, end_run=None) for i in items]
    assert [attrs.astuple(i) for i in bare] == [
        attrs.astuple(i) for i in ordered(expected, problem, schedule)
    ]


def test_heads_and_sequences_with_one_map_share_its_runs() -> None:
    from fa4core.plan.tiles import tile_map
    from primitives import mask

    problem = Problem(2, 8, 2, 64, 64, (512, 512), (512, 512))
    tiles = tile_map(
        mask.causal().expr, batch=2, heads=8, seqlens_q=(512, 512), seqlens_k=(512, 512)
    )
    items, runs = tables(problem, tiles, 2, Schedule())
    assert len(items) == 2 * 8 * 2
    full, first, second = FULL + 4 * FULL, PARTIAL + 4 * FULL, PARTIAL + 4 * PARTIAL
    assert runs.tolist() == [  # steps: the last key tile first
        [-1, 0, second], [0, 1, first],
        [-3, -2, second], [-2, -1, first], [-1, 1, full],
    ]  # fmt: skip


@pytest.mark.parametrize("bytes_of_head", [1, 4 << 20, (63 << 20) + 1, 63 << 20, 1 << 40])
def test_sections_are_powers_of_two_that_fit(bytes_of_head: int) -> None:
    """In 64 bits: a head of 2^22 keys has 2^31 bytes and more."""
    (heads,) = kv_heads_in_section(126 << 20, [bytes_of_head]).tolist()
    assert heads & (heads - 1) == 0
    assert heads == 1 or heads * bytes_of_head <= 63 << 20
    assert 2 * heads * bytes_of_head > 63 << 20


def test_all_query_heads_of_a_kv_head_come_before_the_next_tile() -> None:
    from fa4core.plan.tiles import tile_map
    from primitives import mask

    n = 1 << 17  # keys and values of a head take more than half of the cache's half
    problem = Problem(1, 8, 2, 128, 128, (512,), (n,))
    tiles = tile_map(mask.causal().expr, batch=1, heads=8, seqlens_q=(512,), seqlens_k=(n,))
    items, _ = tables(problem, tiles, 2, Schedule())
    seen = [(item.h, item.tile) for item in (Item(*row) for row in items.tolist())]
    assert seen == [(h, tile) for kv in (0, 4) for tile in (1, 0) for h in range(kv, kv + 4)]
