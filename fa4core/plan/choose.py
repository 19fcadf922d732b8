"""The schedule of a call that asks for none: a rule instead of a search, in this one place.

Simulating every schedule (`makespan`) would cost more than many a call takes. The rule follows from
that model and from what it leaves out, the L2 cache; a test holds it against the model's best. It
does not choose what would change a kernel's code from length to length, but for split keys.
"""

from __future__ import annotations

import numpy as np

from fa4core.plan.problem import Problem
from fa4core.plan.target import Target
from fa4core.plan.tiles import TileMap
from primitives.schedule import Coordinates, Order, Schedule, Source

#: Key blocks that a share of a work tile's keys has at least. A work tile costs as much as 2.5
#: blocks besides its blocks, and the shares' results are merged by another kernel.
SHARE = 8


def choose(problem: Problem, tiles: TileMap, target: Target) -> Schedule:
    """The schedule that a call gets.

    - A queue where there is one: no static list ends earlier, and asking it overlaps with work.
    - The longest tiles first: the last ones to start are then short.
    - Heads in sections, if the keys and values of all heads and sequences do not fit the L2 cache:
      then the order decides how often they are read. Unequal sequences are sorted as a whole, so
      that the last one to start is short although each keeps its tiles together.
    - Split keys, if at least every other SM would have nothing to do and there are keys enough.

    Args:
        problem: Sizes.
        tiles: The mask's tile map.
        target: What the kernel runs on.
    """
    rates = target.measured
    source: Source = "dynamic" if target.work_queue else "persistent"
    bytes_of_key = (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    crowded = sum(problem.seqlens_k) * problem.heads_kv * bytes_of_key > rates.l2_bytes // 2
    unequal = len(set(zip(problem.seqlens_q, problem.seqlens_k, strict=True))) > 1
    order: Order = "batch_sorted" if crowded and unequal else "longest_first"
    splits = _splits(problem, tiles, target)
    coordinates: Coordinates = "split_kv" if splits > 1 else "heads"
    return Schedule(coordinates, source, order, num_splits=splits, l2_sections=crowded)


def _splits(problem: Problem, tiles: TileMap, target: Target) -> int:
    """Shares of the keys: a power of two that leaves no SM without work, and `SHARE` blocks."""
    shape = target.forward_tile(problem.head_dim, problem.head_dim_v)
    rows = shape.q * shape.stages
    work = int((-(-np.array(problem.seqlens_q, np.int64) // rows)).sum()) * problem.heads_q
    if not work or 2 * work > target.measured.sms:
        return 1
    most = int(tiles.lengths().max(initial=0))
    return 1 << max(1, min(target.measured.sms // work, most // SHARE)).bit_length() - 1
