"""The rule for calls without a schedule, against the makespan model and in its details."""

from __future__ import annotations

import attrs
import pytest

from fa4core import Problem, Variant
from fa4core.plan import makespan
from fa4core.plan.choose import SHARE, choose
from fa4core.plan.plan import plan
from fa4core.plan.target import SM90, SM100
from fa4core.plan.tiles import tile_map
from primitives import mask

CAUSAL, FULL, WINDOW = mask.causal(), mask.full(), mask.sliding_window(1024, 0)


def same(length: int, *, batch: int = 1, heads: int = 16, group: int = 1) -> Problem:
    lengths = (length,) * batch
    return Problem(batch, heads, heads // group, 128, 128, lengths, lengths)


def packed(*lengths: int, heads: int = 16) -> Problem:
    return Problem(len(lengths), heads, heads, 128, 128, lengths, lengths)


def decode(keys: int, heads: int, batch: int = 1) -> Problem:
    return Problem(batch, heads, heads, 128, 128, (1,) * batch, (keys,) * batch)


PROBLEMS = {
    "causal": (CAUSAL, same(8192)),
    "short": (CAUSAL, same(1024, batch=32)),
    "full": (FULL, same(4096, batch=2)),
    "window": (WINDOW, same(16384, batch=2)),
    "few heads": (CAUSAL, same(32768, heads=4)),
    "grouped": (CAUSAL, same(16384, heads=32, group=8)),
    "long last": (CAUSAL, packed(*[1024] * 15, 8192, heads=2)),
    "many lengths": (CAUSAL, packed(*range(128, 16000, 331))),
    "decode": (FULL, decode(65536, 8)),
    "decode of many": (FULL, decode(8192, 16, batch=64)),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_model_knows_nothing_much_better(name: str) -> None:
    """Of all sources and orders, with the same sections: the queue is what makes the difference."""
    chosen, problem = PROBLEMS[name]
    made = plan(Variant(mask=chosen), problem)
    alike = [e for e in made.estimates() if e.schedule.coordinates == made.schedule.coordinates]
    (mine,) = (e for e in alike if e.schedule == made.schedule)
    assert mine.seconds <= 1.02 * makespan.best(alike).seconds


def chosen_for(chosen: mask.Mask, problem: Problem, target=SM100):
    tiles = tile_map(
        chosen.expr, batch=problem.batch, heads=problem.heads_q,
        seqlens_q=problem.seqlens_q, seqlens_k=problem.seqlens_k,
    )  # fmt: skip
    return choose(problem, tiles, target)


def test_sections_where_keys_and_values_do_not_fit_the_cache() -> None:
    """Half of 126 MiB; 16 heads of 8,192 keys have 64."""
    assert chosen_for(CAUSAL, same(8192)).l2_sections
    assert not chosen_for(CAUSAL, same(8064)).l2_sections
    assert not chosen_for(CAUSAL, attrs.evolve(same(8192), heads_kv=1)).l2_sections


def test_unequal_sequences_are_sorted_where_there_are_sections() -> None:
    assert chosen_for(CAUSAL, packed(16384, 1024)).order == "batch_sorted"
    assert chosen_for(CAUSAL, packed(16384, 16384)).order == "longest_first"
    assert chosen_for(CAUSAL, packed(300, 1024)).order == "longest_first"


def test_a_queue_only_where_the_hardware_has_one() -> None:
    assert chosen_for(CAUSAL, same(1024)).source == "dynamic"
    assert chosen_for(CAUSAL, same(1024), SM90).source == "persistent"


def test_keys_are_split_for_idle_processors_and_many_blocks_only() -> None:
    assert chosen_for(FULL, decode(65536, 8)).num_splits == 16  # 148 SMs for 8 work tiles
    assert chosen_for(FULL, decode(8192, 8)).num_splits == 64 // SHARE
    assert chosen_for(FULL, decode(1024, 8)).num_splits == 1
    assert chosen_for(FULL, decode(65536, 8, batch=10)).num_splits == 1
    assert chosen_for(mask.sliding_window(512, 0), decode(65536, 8)).num_splits == 1
    assert chosen_for(FULL, Problem(1, 8, 8, 128, 128, (0,), (65536,))).num_splits == 1
