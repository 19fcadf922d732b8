"""Query heads packed into the rows of a tile: `Schedule(coordinates="packed_gqa")`."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from both import execute, on_both

from fa4core import Variant, dispatch
from fa4core.forward.coordinates import packing
from fa4core.plan.groups import group_map
from fa4core.plan.problem import Problem
from fa4core.plan.tiles import EMPTY, FULL, PARTIAL, tile_map
from fa4core.testing import LayoutSpec, Shape
from primitives import mask
from primitives.schedule import Schedule

SCHEDULE = "schedule=schedule.Schedule(coordinates='packed_gqa')"
SEQUSED, VARLEN = LayoutSpec("seqused", slack=3), LayoutSpec("varlen")


@on_both("heads, heads_kv", [(4, 1), (6, 2), (10, 2)], sm100=[(10, 2)], sm90=[])
def test_causal_tiles_of_any_group(target: str, heads: int, heads_kv: int) -> None:
    """Groups that divide a tile and groups that leave rows over; fewer keys than queries, too."""
    variant = f"Variant(mask=mask.causal(), {SCHEDULE})"
    lengths = (150, 0, 40, 3), (130, 40, 0, 200)
    execute(target, variant, Shape(*lengths, heads, heads_kv, 64, 64), SEQUSED)
    execute(target, variant, Shape(*lengths, heads, heads_kv, 64, 64), VARLEN, seed=1, num_sms=1)


@on_both()
def test_mods_see_the_query_and_head_of_their_row(target: str) -> None:
    """Masks, scores and sinks that differ between the heads of a group."""
    variant = (
        "Variant(mask=mask.define(lambda b, h, q, k: k <= q + 20 * h) & mask.sliding_window(90, 60)"
        ", score=score.alibi(normal(1, 6, std=0.2)) >> score.dense_bias(normal(2, 100, 140)), "
        f"sink=sink.learned(normal(3, 6)), {SCHEDULE})"
    )
    shape = Shape((100, 80), (140, 90), 6, 2, 64, 64)
    for seed in range(2):
        execute(target, variant, shape, VARLEN, seed=seed, num_sms=1 + 3 * seed)


@on_both(sm90=False)
def test_few_queries_take_one_tile(target: str) -> None:
    """Decoding: the whole group in one query tile."""
    variant = f"Variant(mask=mask.causal(), {SCHEDULE})"
    execute(target, variant, Shape((1, 1), (300, 17), 8, 1, 128, 128), SEQUSED)
    execute(target, variant, Shape((16, 16), (300, 5), 8, 1, 128, 128), SEQUSED, seed=1)


def test_the_whole_group_is_packed_where_it_fits() -> None:
    program = Variant(schedule=Schedule(coordinates="packed_gqa")).program
    for group, expected in ((1, 1), (4, 4), (5, 5), (128, 128), (192, 96), (131, 1)):
        assert packing(program, Problem(1, group, 1, 64, 64, (7,), (7,)), 128) == expected
    assert packing(Variant().program, Problem(1, 4, 1, 64, 64, (7,), (7,)), 128) == 1


@on_both(sm90=False)
def test_a_group_larger_than_a_tile_is_packed_in_parts(target: str) -> None:
    execute(target, f"Variant({SCHEDULE})", Shape((3,), (140,), 192, 1, 16, 16))


def test_the_map_of_a_group_is_the_union_of_its_heads() -> None:
    """FULL where every head is, EMPTY where every head is."""
    window = mask.define(lambda b, h, q, k: (q >= k) & (k >= q - 100 * (h + 1)))
    sizes = {"batch": 2, "seqlens_q": (300, 90), "seqlens_k": (500, 700), "tile_q": 42}
    groups = group_map(window.expr, 3, heads=6, **sizes)
    heads = tile_map(window.expr, heads=6, **sizes)
    for b in range(2):
        for h in range(2):
            kinds = np.stack([heads.dense(b, 3 * h + i) for i in range(3)])
            all_empty, all_full = (kinds == EMPTY).all(0), (kinds == FULL).all(0)
            expected = np.where(all_empty, EMPTY, np.where(all_full, FULL, PARTIAL))
            assert (groups.dense(b, h) == expected).all()
    assert groups.counts()[FULL] > 0


def test_only_the_tile_map_that_is_used_is_made(monkeypatch) -> None:
    """The map of tiles that aren't packed is none of the kernel's."""

    def refuse(*_, **__):
        raise AssertionError("nobody asked for it")

    monkeypatch.setattr(dispatch, "tile_map", refuse)
    packed = Schedule(coordinates="packed_gqa")
    problem = Problem(2, 8, 2, 64, 64, (1, 1), (300, 400))
    assert len(dispatch.kernels_of(Variant(schedule=packed), [problem], "sm100", 1.0, False)) == 1
    with pytest.raises(AssertionError, match="nobody asked"):
        dispatch.kernels_of(Variant(), [problem], "sm100", 1.0, False)
