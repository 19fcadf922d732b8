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
        batch_map: (batch,) int32: the sequence at each place of a batch-sorted order, else None.
    """

    items: Tensor
    runs: Tensor
    batch_map: Tensor | None = None

    def __len__(self) -> int:
        return len(self.items)


@attrs.frozen
class _Nothing:
    """The pre-pass is compiled for nothing in particular."""


def metadata(
    problem: Problem, tiles: TileMap, side: int, schedule: Schedule, place: Place, device: Any
) -> Metadata:
    """The plan of a problem, on a device.

    Args:
        problem, tiles, side, schedule: As of `tables`.
        place: Where the kernel runs .
        device: Of the tensors.
    """
    unsorted = np.arange(problem.batch)
    items, runs = tables(problem, tiles, side, schedule, planned(place.target), batch_rank=unsorted)
    if schedule.num_splits > 1:
        items, runs = shares(items, runs, schedule.num_splits)
    if schedule.order == "batch_sorted":
        return sorted_by_batch(items, runs, problem.batch, place, device)
    return Metadata(items.to(device), runs.to(device))


def sorted_by_batch(items: Tensor, runs: Tensor, batch: int, place: Place, device: Any) -> Metadata:
    """Run the pre-pass on work tiles that are in order within each sequence, one after another."""
    column = [f.name for f in attrs.fields(Item)].index("b")
    count = np.bincount(items[:, column].numpy(), minlength=batch)
    first = torch.from_numpy(np.concatenate([[0], np.cumsum(count)]).astype(np.int32)).to(device)
    items, runs = items.to(device), runs.to(device)
    in_order = items.clone()
    batch_map = torch.arange(batch, dtype=torch.int32, device=device)
    if len(items) and place.launcher is not None:
        warps = -(-int(count.max()) // TILES_OF_A_WARP)
        arguments = items, first, torch.zeros_like(batch_map), batch_map, in_order, warps
        launch = place.launcher(obtain(pre_pass(place)).function)
        launch(*map(place.converted, arguments))
    return Metadata(in_order, runs, batch_map)


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
