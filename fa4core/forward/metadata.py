"""`Metadata`: the plan of a call where its kernel runs, made once and passed to every launch.

Whatever has the same lengths, mask and schedule can use it again, whatever its tensors hold. For a
batch-sorted schedule it is what the pre-pass (`sort`) writes; sorting then costs nothing later.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import torch

from fa4core.compile.cache import obtain
from fa4core.compile.kernel import Kernel, TensorType
from fa4core.forward.lists import dealt, every_nth, listed
from fa4core.forward.shares import shares
from fa4core.forward.tables import tables
from fa4core.forward.work import Item
from fa4core.places import Place
from fa4core.plan.problem import Problem
from fa4core.plan.target import target as planned
from fa4core.plan.tiles import TileMap
from primitives.schedule import Schedule

Tensor = torch.Tensor

TILES_OF_A_WARP = 512  # work tiles that a warp of the pre-pass moves; more warps beyond


@attrs.frozen(eq=False)
class Metadata:
    """See the module.

    Attributes:
        items: (n, fields) int32: work tiles in the order in which they are handed out.
        runs: (m, 3) int32: their runs of key tiles.
        lists: (CTAs + 1,) int32: where the items of each begin, and the end of the last one's. None
            where CTA i has the items i, i + CTAs, ... or they come from a queue.
        batch_map: (batch,) int32: the sequence at each place of a batch-sorted order, else None.
    """

    items: Tensor
    runs: Tensor
    lists: Tensor | None = None
    batch_map: Tensor | None = None

    def __len__(self) -> int:
        return len(self.items)


@attrs.frozen
class _Nothing:
    """The pre-pass is compiled for nothing in particular."""


def metadata(
    problem: Problem,
    tiles: TileMap,
    side: int,
    schedule: Schedule,
    place: Place,
    device: Any,
    dealing: bool = False,
) -> Metadata:
    """The plan of a problem, on a device.

    Args:
        problem, tiles, side, schedule: As of `tables`.
        place: Where the kernel runs.
        device: Of the tensors.
        dealing: Whether the kernel goes by `lists`.
    """
    unsorted = np.arange(problem.batch)
    items, runs = tables(problem, tiles, side, schedule, planned(place.target), batch_rank=unsorted)
    if schedule.num_splits > 1:
        items, runs = shares(items, runs, schedule.num_splits)
    found = Metadata(items.to(device), runs.to(device))
    sorts = schedule.order == "batch_sorted"
    if sorts:
        found = sorted_by_batch(found, problem.batch, place)
    if not dealing:
        return found
    ctas = min(len(items), place.sms) if schedule.source == "persistent" else len(items)
    owner = every_nth(len(items), ctas) if sorts else dealt(items, ctas)
    order, lists = listed(owner)
    return attrs.evolve(found, items=found.items[order.to(device)], lists=lists.to(device))


def sorted_by_batch(plan: Metadata, batch: int, place: Place) -> Metadata:
    """Run the pre-pass on work tiles that are in order within each sequence, one after another."""
    items, device = plan.items, plan.items.device
    column = [f.name for f in attrs.fields(Item)].index("b")
    count = items[:, column].bincount(minlength=batch).cpu()
    first = torch.cat([count.new_zeros(1), count.cumsum(0)]).int().to(device)
    in_order = items.clone()
    batch_map = torch.arange(batch, dtype=torch.int32, device=device)
    if len(items) and place.launcher is not None:
        warps = -(-int(count.max()) // TILES_OF_A_WARP)
        arguments = items, first, torch.zeros_like(batch_map), batch_map, in_order, warps
        launch = place.launcher(obtain(pre_pass(place)).function)
        launch(*map(place.converted, arguments))
    return attrs.evolve(plan, items=in_order, batch_map=batch_map)


def pre_pass(place: Place) -> Kernel:
    """The kernel that sorts."""
    table, column = (TensorType("int32", rank) for rank in (2, 1))
    return Kernel(
        "fa4core.forward.sort:sort_batch",
        (table, column, column, column, table, "int32"),
        _Nothing(),
        place.target,
        place.emulated,
    )
