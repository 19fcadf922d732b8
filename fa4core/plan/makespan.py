"""How long a schedule takes: list scheduling of work tiles over the SMs, simulated.

Every figure from here is modelled, not measured: a work tile costs its blocks' bound (roofline)
divided by the pipeline's efficiency, plus a fixed part (costs.py says where both come from), and
tiles run on SMs one after another. What the model leaves out: the L2 cache (so `l2_sections`
changes the order here, not the cost of a tile), contention, and the clock under power limits.
Reading inputs and writing outputs once through global memory is a lower limit on the time.

`plan` uses it to choose a schedule, `explain` to show the alternatives.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import get_args

import attrs
import numpy as np

from fa4core.plan.costs import Cost
from fa4core.plan.target import Rates
from primitives.schedule import Order, Schedule, Source


@attrs.frozen(eq=False)
class WorkTiles:
    """Work tiles in natural order: sequence, head, tile.

    Attributes:
        sequence: (n,) int: the sequence of each tile.
        head: (n,) int: its head, or its KV head if query heads are packed.
        index: (n,) int: its place among the tiles of its head.
        blocks: (n,) int: blocks that are not empty.
        cycles: (n,) float: what its blocks cost.
        group: Heads that share a KV head.
    """

    sequence: np.ndarray
    head: np.ndarray
    index: np.ndarray
    blocks: np.ndarray
    cycles: np.ndarray
    group: int = 1

    def __len__(self) -> int:
        return len(self.cycles)

    def split(self, num_splits: int) -> WorkTiles:
        """Every tile in `num_splits` tiles that share its blocks as evenly as possible."""
        share = np.arange(num_splits)[None, :]
        blocks = (self.blocks[:, None] + share) // num_splits
        per_block = self.cycles / np.maximum(self.blocks, 1)
        return WorkTiles(
            np.repeat(self.sequence, num_splits),
            np.repeat(self.head, num_splits),
            np.repeat(self.index, num_splits),
            blocks.ravel(),
            (blocks * per_block[:, None]).ravel(),
            self.group,
        )


@attrs.frozen
class Workload:
    """What does not depend on the schedule.

    Attributes:
        rates: The GPU's.
        cost: The pipeline's.
        machines: SMs, or pairs of SMs where two CTAs share an MMA.
        flop: Of the attended scores; full tiles count whole, partial ones half.
        bytes_moved: Inputs read and outputs written once.
        combine_bytes: Partial results written and read again, for each split of the keys.
        kv_heads_in_section: KV heads whose keys and values fit the L2 cache together, or an array
            with a number for each sequence.
        deals: Whether static lists are dealt by time, see `loads`, or `evened`, which comes to
            about the same.
    """

    rates: Rates
    cost: Cost
    machines: int
    flop: float
    bytes_moved: float
    combine_bytes: float = 0.0
    kv_heads_in_section: int | np.ndarray = 1
    deals: bool = False


@attrs.frozen
class Estimate:
    """Modelled time of one schedule.

    Attributes:
        schedule: The choices.
        tiles: Work tiles.
        cycles: Makespan, in cycles of an SM.
        utilisation: Mean share of the makespan during which an SM has work.
        seconds: Time at the target's clock, at least that of moving the data once.
        tflops: Modelled TFLOP/s.
        memory_bound: Whether moving the data takes longer than computing.
    """

    schedule: Schedule
    tiles: int
    cycles: float
    utilisation: float
    seconds: float
    tflops: float
    memory_bound: bool


def arrange(
    tiles: WorkTiles,
    schedule: Schedule,
    kv_heads_in_section: int | np.ndarray = 1,
    batch_rank: np.ndarray | None = None,
) -> np.ndarray:
    """The order in which tiles are handed out, as indices into `tiles`.

    With sections: sequences one after another; within one, sections of heads whose keys and values
    fit the cache; within a section by the schedule's order, heads side by side, so that all query
    heads of a KV head come before the next tile (FlashAttention-4, section 3.3). Without: all tiles
    by the schedule's order. `batch_sorted` is longest first within each sequence, the sequences
    sorted by their longest tile.

    Args:
        tiles: In natural order.
        schedule: Its order and sections.
        kv_heads_in_section: KV heads of a section; an array has a number for each sequence.
        batch_rank: The place of each sequence for `batch_sorted`, if something else sorts them.
    """
    sequence, head = tiles.sequence, tiles.head
    if schedule.order == "batch_sorted" and len(tiles):
        rank = by_longest_tile(tiles) if batch_rank is None else batch_rank
        sequence = rank[sequence]
    by_sequence = schedule.l2_sections or schedule.order == "batch_sorted"
    outer = [sequence] if by_sequence else []
    if schedule.l2_sections:
        size = np.asarray(kv_heads_in_section) * tiles.group
        outer.append(head // (size[tiles.sequence] if size.ndim else size))
    if schedule.order == "in_order":
        inner = [tiles.index, head] if schedule.l2_sections else [head, tiles.index]
        return np.lexsort([*(outer or [sequence]), *inner][::-1])
    time = tiles.cycles if schedule.order == "shortest_first" else -tiles.cycles
    return np.lexsort([*outer, time, sequence, head][::-1])


def by_longest_tile(tiles: WorkTiles) -> np.ndarray:
    """The place of each sequence among all, sorted by the time of the longest tile, longest first;
    sequences of one time stay in order."""
    longest = np.full(int(tiles.sequence.max(initial=-1)) + 1, -1.0)
    np.maximum.at(longest, tiles.sequence, tiles.cycles)
    rank = np.empty(len(longest), np.int64)
    rank[np.argsort(-longest, kind="stable")] = np.arange(len(longest))
    return rank


def evened(costs: np.ndarray, machines: int) -> np.ndarray:
    """An order for a static list, so that machine i's tiles i, i + machines, ... take as long as
    everybody's: in every round, the longest tile goes to whoever has least so far.

    Args:
        costs: (n,) of tiles in the order in which they would be handed out; a tile stays in its
            round.
        machines: How many share the list.
    """
    taken = np.zeros(machines)
    rounds = np.full((-(-len(costs) // machines), machines), -1)
    for number, row in enumerate(rounds):
        tiles = np.arange(number * machines, min((number + 1) * machines, len(costs)))
        tiles = tiles[np.argsort(-costs[tiles], kind="stable")]
        free = np.argsort(taken, kind="stable")[: len(tiles)]
        row[free] = tiles
        taken[free] += costs[tiles]
    # which machine is which does not matter: those with a tile in the last round come first
    machine = np.argsort(rounds[-1:].max(0, initial=-1) < 0, kind="stable")
    order = rounds[:, machine].reshape(-1)
    return order[order >= 0]


def loads(durations: np.ndarray, machines: int, source: Source, dealt: bool = False) -> np.ndarray:
    """When each of `machines` SMs is done with its tiles, in cycles.

    A static list gives SM i the tiles i, i + machines, ..., unless the host deals them by their
    time; then, as from the other sources, the next tile goes to whichever SM is free first.
    """
    if source == "persistent" and not dealt:
        owner = np.arange(len(durations)) % machines
        return np.bincount(owner, weights=durations, minlength=machines)
    if len(durations) <= machines:
        return np.concatenate([durations, np.zeros(machines - len(durations))])
    busy = [0.0] * machines
    for duration in durations.tolist():
        heapq.heapreplace(busy, busy[0] + duration)
    return np.array(busy)


def simulate(tiles: WorkTiles, schedule: Schedule, workload: Workload) -> Estimate:
    """The modelled time of one schedule.

    Args:
        tiles: In natural order, for the schedule's coordinates; keys not yet split.
        schedule: The choices.
        workload: What does not depend on them.
    """
    rates, cost = workload.rates, workload.cost
    tiles = tiles.split(schedule.num_splits) if schedule.num_splits > 1 else tiles
    order = arrange(tiles, schedule, workload.kv_heads_in_section)
    durations = tiles.cycles[order] + cost.tile_cycles
    if schedule.source != "one_tile":
        durations = durations - cost.setup_cycles
    dealt = workload.deals and schedule.order != "batch_sorted"  # that order is made on the device
    finished = loads(durations, workload.machines, schedule.source, dealt)
    if schedule.source != "one_tile":
        finished = finished + cost.setup_cycles * (finished > 0)
    cycles = float(finished.max(initial=0.0))
    computing = cycles / (rates.clock_ghz * 1e9)
    moving = workload.bytes_moved / (rates.hbm_tbps * 1e12)
    combining = 0.0
    if schedule.num_splits > 1:
        combining = schedule.num_splits * workload.combine_bytes / (rates.hbm_tbps * 1e12)
    seconds = max(computing, moving) + combining
    return Estimate(
        schedule=schedule,
        tiles=len(tiles),
        cycles=cycles,
        utilisation=float(finished.mean() / cycles) if cycles else 0.0,
        seconds=seconds,
        tflops=workload.flop / seconds / 1e12 if seconds else 0.0,
        memory_bound=moving > computing,
    )


def candidates(
    packed: bool, unequal: bool, splits: Sequence[int] = (), sections: bool = True, ctas: int = 1
) -> list[Schedule]:
    """Every schedule worth comparing.

    Args:
        packed: Whether several query heads share a KV head, so that they can be packed.
        unequal: Whether the sequences differ, so that sorting them is a choice.
        splits: Numbers of shares of the keys to try.
        sections: Whether heads are grouped for the L2 cache.
        ctas: CTAs that share a work tile.
    """
    coordinates: list[tuple] = [("heads", 1)]
    coordinates += [("packed_gqa", 1)] if packed else []
    coordinates += [("split_kv", n) for n in splits]
    orders = [o for o in get_args(Order) if o != "batch_sorted" or unequal]
    return [
        Schedule(c, source, order, num_splits=n, l2_sections=sections, ctas=ctas)
        for (c, n), source, order in itertools.product(coordinates, get_args(Source), orders)
    ]


def best(estimates: Iterable[Estimate]) -> Estimate:
    """The fastest; of equals (within 0.1 %) the one that comes first.

    Raises:
        ValueError: There is none.
    """
    estimates = list(estimates)
    if not estimates:
        raise ValueError("no schedule to choose from")
    limit = min(e.seconds for e in estimates) * 1.001
    return next(e for e in estimates if e.seconds <= limit)


def useful_splits(tiles: WorkTiles, machines: int) -> list[int]:
    """Shares of the keys that can help: powers of two while SMs would be idle without them."""
    most = int(tiles.blocks.max(initial=0))
    if not len(tiles) or len(tiles) >= machines or most < 2:
        return []
    limit = min(most, 2 * math.ceil(machines / len(tiles)), 128)
    return [2**i for i in range(1, int(math.log2(limit)) + 1)]


def kv_heads_in_section(l2_bytes: int, bytes_of_head: Sequence[int] | np.ndarray) -> np.ndarray:
    """Heads whose keys and values fit the L2 cache together, a power of two (at least one).

    Half of the cache is left to queries, outputs and what other SMs are ahead with.

    Args:
        l2_bytes: Size of the cache.
        bytes_of_head: Keys and values of one head, for each sequence.
    """
    fitting = l2_bytes // 2 // np.maximum(1, np.asarray(bytes_of_head, np.int64))
    exponent = np.frexp(np.maximum(1, fitting).astype(np.float64))[1] - 1
    return np.left_shift(np.int64(1), exponent.astype(np.int64))
