"""Keys shared among several workers, and the kernel that merges their results."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from both import execute, on_both

from fa4core import Variant, attention
from fa4core.compile import cache
from fa4core.forward.shares import shares
from fa4core.forward.tables import tables
from fa4core.forward.work import Item, Run
from fa4core.plan.problem import Problem
from fa4core.plan.tiles import tile_map
from fa4core.testing import LayoutSpec, Shape
from primitives import mask
from primitives.schedule import Schedule

SEQUSED, VARLEN = LayoutSpec("seqused", slack=3), LayoutSpec("varlen")


def split(count: int) -> str:
    return f"schedule=schedule.split_kv({count})"


@on_both("count", [2, 5])
def test_causal_with_sinks_and_empty_shares(target: str, count: int) -> None:
    """More shares than blocks, sequences without keys, rows that attend to nothing."""
    variant = f"Variant(mask=mask.causal(), sink=sink.learned(normal(2, 2)), {split(count)})"
    shape = Shape((150, 0, 5, 40), (500, 40, 0, 17), 2, 1, 64, 64)
    execute(target, variant, shape, SEQUSED, num_sms=1)
    execute(target, variant, shape, VARLEN, seed=1, num_sms=4)


@on_both(sm90=False)
def test_without_sinks_rows_with_nothing_to_attend_to_are_zero(target: str) -> None:
    variant = f"Variant(mask=mask.causal() & mask.sliding_window(100, 0), {split(3)})"
    execute(target, variant, Shape((300, 20), (260, 0), 2, 1, 64, 40), SEQUSED, dtype="float16")


@on_both()
def test_decoding_with_split_pages(target: str) -> None:
    layout = LayoutSpec("paged", page_size=32)
    execute(target, f"Variant({split(4)})", Shape((1, 1, 1), (700, 17, 0), 4, 2, 128, 128), layout)


def test_the_number_of_shares_compiles_nothing() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 2, 2, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 700, 2, 64, dtype=torch.bfloat16) for _ in range(2))
    results, kernels = [], set()
    for count in (2, 3, 7):
        chosen = Schedule(coordinates="split_kv", num_splits=count)
        results.append(attention(q, k, v, Variant(schedule=chosen), backend="emulator"))
        kernels.add(cache.statistics().kernels)
    assert len(kernels) == 1
    for result in results:
        torch.testing.assert_close(result, results[0], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("count", [2, 3, 20])
def test_shares_are_consecutive_and_as_equal_as_can_be(count: int) -> None:
    lengths = (300, 0, 100), (900, 300, 0)
    problem = Problem(3, 2, 1, 64, 64, *lengths)
    window = mask.sliding_window(200, 300)
    tiles = tile_map(window.expr, batch=3, heads=2, seqlens_q=lengths[0], seqlens_k=lengths[1])
    items, runs = tables(problem, tiles, 2, Schedule())
    shared, cut = shares(items, runs, count)
    assert len(shared) == count * len(items)

    def blocks(row: list[int], table: torch.Tensor) -> list[tuple[int, int]]:
        item = Item(*row)
        found = [Run(*r) for r in table[item.first_run : item.end_run].tolist()]
        each = [(j, run.kinds) for run in found for j in range(run.first, run.end)]
        assert len(each) == item.blocks
        return each

    for i, row in enumerate(items.tolist()):
        parts = [blocks(r, cut) for r in shared[i * count : (i + 1) * count].tolist()]
        assert [block for part in parts for block in part] == blocks(row, runs)
        assert np.ptp([len(p) for p in parts]) <= 1
        assert [Item(*r).share for r in shared[i * count : (i + 1) * count].tolist()] == list(
            range(count)
        )
