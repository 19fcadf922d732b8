"""The makespan simulation: list scheduling, orders, and the model against measured figures."""

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fa4core import Problem, Variant
from fa4core.plan import makespan, roofline
from fa4core.plan.costs import Cost
from fa4core.plan.makespan import Workload, WorkTiles, arrange, loads, simulate
from fa4core.plan.plan import plan
from fa4core.plan.target import CPU, SM90, SM100
from fa4core.plan.tiles import FULL, PARTIAL
from primitives import mask
from primitives.schedule import Schedule

FREE = Cost(efficiency=1.0, tile_cycles=0.0, setup_cycles=0.0)


def tiles_of(cycles, heads=1, batch=1):
    """The same tiles for every head and sequence."""
    n = len(cycles)
    return WorkTiles(
        sequence=np.repeat(np.arange(batch), heads * n),
        head=np.tile(np.repeat(np.arange(heads), n), batch),
        index=np.tile(np.arange(n), batch * heads),
        blocks=np.tile(np.asarray(cycles, dtype=np.int64), batch * heads),
        cycles=np.tile(np.asarray(cycles, dtype=float), batch * heads),
    )


def workload(machines=4, cost=FREE, **more):
    return Workload(SM100.rates, cost, machines, flop=1e9, bytes_moved=0.0, **more)


# -------------------------------------------------------------------------- list scheduling


def greedy(durations, machines):
    busy = [0.0] * machines
    for d in durations:
        first = min(range(machines), key=lambda i: busy[i])
        busy[first] += d
    return busy


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 9))
def test_dynamic_gives_the_next_tile_to_whoever_is_free(durations, machines):
    found = loads(np.array(durations, dtype=float), machines, "dynamic")
    assert sorted(found) == sorted(greedy(durations, machines))


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 9))
def test_lists_that_are_dealt_are_as_long_as_those_of_a_queue(durations, machines):
    durations = np.array(durations, dtype=float)
    found = loads(durations, machines, "persistent", dealt=True)
    assert list(found) == list(loads(durations, machines, "dynamic"))


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 9))
def test_an_evened_list_keeps_rounds(durations, machines):
    """Tiles stay in their round; what remains between machines is no more than a tile."""
    costs = np.array(durations, dtype=float)
    order = makespan.evened(costs, machines)
    assert sorted(order.tolist()) == list(range(len(costs)))
    assert (order // machines == np.arange(len(costs)) // machines).all()
    full = len(costs) // machines * machines
    done = loads(costs[order][:full], machines, "persistent")
    assert done.max() - done.min() <= costs[:full].max(initial=0) + 1e-6


def test_an_evened_list_helps_causal():
    """Four sections of 64, 63, ... blocks, 148 machines: nearly what a queue would give."""
    blocks = np.tile(np.repeat(np.arange(64, 0, -1), 16), 4).astype(float)
    even = loads(blocks[makespan.evened(blocks, 148)], 148, "persistent").max()
    assert even <= 1.02 * loads(blocks, 148, "dynamic").max()
    assert even <= 0.96 * loads(blocks, 148, "persistent").max()


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 9))
def test_a_static_list_takes_every_nth_tile(durations, machines):
    found = loads(np.array(durations, dtype=float), machines, "persistent")
    assert list(found) == [sum(durations[i::machines]) for i in range(machines)]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 9))
def test_makespan_is_within_grahams_bounds(durations, machines):
    tiles = tiles_of(durations)
    found = simulate(tiles, Schedule("heads", "one_tile", "longest_first"), workload(machines))
    lower = max(*durations, sum(durations) / machines)
    assert lower - 1e-9 <= found.cycles <= (4 / 3) * lower + max(durations)
    assert found.utilisation == pytest.approx(sum(durations) / machines / found.cycles)


def test_nothing_to_do_takes_no_time():
    found = simulate(tiles_of([]), Schedule(), workload())
    assert (found.cycles, found.seconds, found.tflops, found.utilisation) == (0, 0, 0, 0)


def test_a_persistent_cta_is_set_up_once():
    cost = Cost(efficiency=1.0, tile_cycles=100.0, setup_cycles=40.0)
    once, persistent = (
        simulate(tiles_of([10] * 8), Schedule("heads", source, "in_order"), workload(2, cost))
        for source in ("one_tile", "persistent")
    )
    assert once.cycles == 4 * (100 + 10)
    assert persistent.cycles == 40 + 4 * (60 + 10)


def test_memory_is_a_lower_limit():
    moving = attrs.evolve(workload(), bytes_moved=7.7e12)
    found = simulate(tiles_of([10]), Schedule(), moving)
    assert found.memory_bound
    assert found.seconds == pytest.approx(1.0)


# ---------------------------------------------------------------------------------- orders


def test_orders():
    tiles = tiles_of([1, 3, 2], heads=2)
    plain = Schedule("heads", "one_tile", "in_order", l2_sections=False)
    assert list(arrange(tiles, plain)) == [0, 1, 2, 3, 4, 5]
    # heads of a section side by side
    assert list(arrange(tiles, attrs.evolve(plain, l2_sections=True), 2)) == [0, 3, 1, 4, 2, 5]
    longest = Schedule("heads", "one_tile", "longest_first")
    assert list(arrange(tiles, longest, 2)) == [1, 4, 2, 5, 0, 3]
    assert list(arrange(tiles, longest, 1)) == [1, 2, 0, 4, 5, 3]
    shortest = Schedule("heads", "one_tile", "shortest_first")
    assert list(arrange(tiles, shortest, 2)) == [0, 3, 2, 5, 1, 4]


def test_batch_sorted_starts_with_the_longest_sequence():
    tiles = WorkTiles(*(np.array(x) for x in ([0, 1, 1, 2], [0] * 4, [0, 0, 1, 0], [5, 9, 1, 7])),
                      np.array([5.0, 9.0, 1.0, 7.0]))  # fmt: skip
    sorted_ = Schedule("heads", "one_tile", "batch_sorted")
    assert list(arrange(tiles, sorted_)) == [1, 2, 3, 0]
    assert list(arrange(tiles, Schedule("heads", "one_tile", "longest_first"))) == [0, 1, 2, 3]


def test_without_sections_all_sequences_are_sorted_together():
    tiles = tiles_of([1, 3, 2], batch=2)
    longest = Schedule("heads", "one_tile", "longest_first", l2_sections=False)
    assert list(arrange(tiles, longest)) == [1, 4, 2, 5, 0, 3]
    assert list(arrange(tiles, attrs.evolve(longest, order="shortest_first"))) == [0, 3, 2, 5, 1, 4]


def test_sections_are_of_kv_heads_and_may_differ_by_sequence():
    tiles = attrs.evolve(tiles_of([1, 2], heads=4, batch=2), group=2)
    longest = Schedule("heads", "one_tile", "longest_first")
    first = [1, 3, 0, 2, 5, 7, 4, 6]  # two query heads of a KV head at a time
    second = [9, 11, 13, 15, 8, 10, 12, 14]  # all four
    assert list(arrange(tiles, longest, np.array([1, 2]))) == first + second


def test_sections_fit_the_cache():
    head = 8192 * 256 * 2
    assert list(makespan.kv_heads_in_section(126 << 20, [head, 1 << 40])) == [8, 1]
    assert list(makespan.kv_heads_in_section(50 << 20, [head, 1 << 40])) == [4, 1]


def test_longest_first_helps_causal():
    problem = Problem(1, 16, 16, 128, 128, (32768,), (32768,))
    found = {
        (e.schedule.source, e.schedule.order): e.seconds
        for e in plan(Variant(mask=mask.causal()), problem).estimates()
    }
    gain = found["one_tile", "in_order"] / found["one_tile", "longest_first"] - 1
    assert 0.03 < gain < 0.10  # FlashAttention-4, section 3.3, measured 4-8 %


# ---------------------------------------------------------------------------- split keys


@given(st.lists(st.integers(0, 40), max_size=20), st.integers(1, 9))
def test_splitting_keeps_the_work(blocks, splits):
    tiles = tiles_of(blocks)
    parts = tiles.split(splits)
    assert len(parts) == splits * len(tiles)
    by_tile = parts.blocks.reshape(-1, splits)
    assert list(by_tile.sum(axis=1)) == blocks
    assert (np.ptp(by_tile, axis=1) <= 1).all()
    np.testing.assert_allclose(parts.cycles.reshape(-1, splits).sum(axis=1), tiles.cycles)


def test_decode_splits_the_keys():
    problem = Problem(1, 8, 8, 128, 128, (1,), (131072,))
    decode = plan(Variant(mask=mask.causal()), problem)
    assert decode.schedule.coordinates == "split_kv"
    whole = next(e for e in decode.estimates() if e.schedule.num_splits == 1)
    assert makespan.best(decode.estimates()).seconds < whole.seconds / 4


def test_long_prefill_does_not():
    problem = Problem(4, 16, 16, 128, 128, (8192,) * 4, (8192,) * 4)
    assert plan(Variant(mask=mask.causal()), problem).schedule.coordinates == "heads"


# -------------------------------------------------------------------------------- the plan


def test_work_tiles_count_blocks_as_brute_force_does():
    problem = Problem(2, 4, 2, 64, 64, (300, 0), (500, 70))
    windows = torch.tensor([10, 200, 30, 400])
    variant = Variant(mask=mask.sliding_window(windows))
    planned = plan(variant, problem)
    tiles = planned._work_tiles(packed=False)
    expected, packed = [], []
    q, k = torch.arange(300)[:, None], torch.arange(500)[None, :]
    distance = q + 200 - k
    attended = [(distance >= 0) & (distance <= w) for w in windows]
    for dense in attended:
        expected += [blocks(dense[i : i + 256]) for i in (0, 256)]
    for a, b in (attended[:2], attended[2:]):
        packed += [blocks((a | b)[i : i + 128]) for i in (0, 128, 256)]
    assert list(tiles.blocks) == expected
    assert list(planned._work_tiles(packed=True).blocks) == packed
    assert list(tiles.head) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert list(tiles.index) == [0, 1] * 4


def blocks(dense):
    return sum(bool(dense[:, j : j + 128].any()) for j in range(0, dense.shape[1], 128))


def test_attended_scores_do_not_depend_on_the_target():
    """Hopper's tiles of head dim 64 have 192 queries: a window of 128 has other partial tiles."""
    problem = Problem(1, 2, 2, 64, 64, (4096,), (4096,))
    variant = Variant(mask=mask.sliding_window(128, 0))
    assert plan(variant, problem, SM90).attended == plan(variant, problem, SM100).attended


def test_attended_scores_of_full_and_causal():
    problem = Problem(1, 2, 2, 64, 64, (1000,), (1000,))
    assert plan(Variant(), problem).attended == 2 * 1000 * 1000
    causal = plan(Variant(mask=mask.causal()), problem).attended
    assert causal == pytest.approx(2 * 1000 * 1001 / 2, rel=0.02)


def test_keys_outside_every_window_are_not_read():
    decode = Problem(1, 8, 1, 128, 128, (1,), (1 << 20,))
    narrow = plan(Variant(mask=mask.sliding_window(1000)), decode)
    assert 1001 <= narrow._keys_read <= 1001 + 2 * 128


@pytest.mark.parametrize("kind", [PARTIAL, FULL])
def test_masks_cost_only_in_partial_tiles(kind):
    problem = Problem(1, 1, 1, 128, 128, (1024,), (1024,))
    plain, causal = (plan(Variant(mask=m), problem) for m in (mask.full(), mask.causal()))
    more = causal.roofline(kind).alu - plain.roofline(kind).alu
    assert more == (256 * 128 / 64 if kind == PARTIAL else 0)


def test_there_is_no_model_of_a_cpu():
    problem = Problem(1, 1, 1, 128, 128, (1024,), (1024,))
    on_cpu = plan(Variant(), problem, CPU)
    assert on_cpu.schedule == Schedule()
    with pytest.raises(ValueError, match="'cpu' has no roofline"):
        on_cpu.estimates()


# -------------------------------------------------------------- against measured figures

# FlashAttention-4 on one H200, TFLOP/s: d = 128, 16 heads, 32k tokens in all, by seqlen / 1024.
FORWARD = {
    "causal": {1: 402, 4: 571, 8: 618, 16: 644, 32: 659},
    "full": {1: 545, 4: 644, 8: 663, 16: 677, 32: 677},
    "window": {4: 468, 8: 472, 16: 476, 32: 472},
}
BACKWARD = {
    "causal": {1: 360, 4: 524, 8: 574, 16: 608, 32: 587},
    "full": {1: 472, 4: 581, 8: 593, 16: 625, 32: 591},
    "window": {4: 423, 8: 430, 16: 397, 32: 428},
}
MASKS = {
    "causal": mask.causal(),
    "full": mask.full(),
    "window": mask.causal() & mask.sliding_window(1024),
}
CASES = [(name, s) for name, row in FORWARD.items() for s in row]


@pytest.mark.parametrize(("name", "seqlen"), CASES)
def test_model_of_an_h200(name, seqlen):
    """The two constants of a pass are fitted to these figures; the other 12 are the test."""
    batch, lengths = 32 // seqlen, (1024 * seqlen,) * (32 // seqlen)
    planned = plan(
        Variant(mask=MASKS[name]), Problem(batch, 16, 16, 128, 128, lengths, lengths), SM90
    )
    schedule = Schedule("heads", "one_tile", "longest_first")
    for backward, measured, within in ((False, FORWARD, 0.06), (True, BACKWARD, 0.16)):
        found = [e for e in planned.estimates(backward=backward) if e.schedule == schedule]
        assert found[0].tflops == pytest.approx(measured[name][seqlen], rel=within)


def test_model_of_a_b200_takes_the_replayed_cycles():
    problem = Problem(1, 16, 16, 128, 128, (8192,), (8192,))
    planned = plan(Variant(mask=mask.causal(), exp=None), problem)
    full = roofline.forward(SM100, 256, 128, 128).cycles
    assert 1.05 < 1 / SM100.cost(128).efficiency < 1.3
    assert planned._block_cycles(backward=False)[1] == full / SM100.cost(128).efficiency
    for ctas, cycles in ((1, 4367), (2, 3914)):
        pairs = plan(Variant(mask=mask.causal(), schedule=Schedule(ctas=ctas)), problem)
        partial, full = pairs._block_cycles(backward=True)
        assert full == pytest.approx(cycles)
        assert partial >= full


def test_sorting_the_batch_helps_a_long_last_sequence():
    lengths = (1024,) * 15 + (8192,)
    problem = Problem(16, 2, 2, 128, 128, lengths, lengths)
    found = {
        e.schedule.order: e.seconds
        for e in plan(Variant(mask=mask.causal(), schedule=Schedule()), problem, SM90).estimates()
        if e.schedule.source == "one_tile"
    }
    assert found["batch_sorted"] < 0.95 * found["longest_first"] < found["in_order"]
