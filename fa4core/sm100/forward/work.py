"""Work tiles and their runs of key tiles: the one plan that all roles read.

On the host it is made from the reference's tile maps and stored in two small int32 tensors; on the
device a role reads a row of them at a time. No role computes a trip count or a bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import torch

from fa4core.pipeline.effects import Fixed
from fa4core.pipeline.endpoint import Ends
from fa4core.plan.problem import Problem
from fa4core.plan.tiles import EMPTY, FULL, PARTIAL, TileMap
from fa4core.sm100.forward.spec import TILE
from primitives.schedule import Order


@attrs.frozen(eq=False)
class Item:
    """A work tile: `tiles` query tiles of one head, side by side.

    Attributes:
        b, h: As mods see them.
        b_q, b_k: Index into the batch mode of queries and of keys; 0 where they are packed.
        h_kv: KV head.
        tile: Number of the group of query tiles.
        first_run, end_run: Its rows in the table of runs.
        blocks: Key tiles to visit in all.
        seqlen_q, seqlen_k: Lengths of the sequence.
        start_q, start_k: First row of the sequence in its tensor.
    """

    b: Any
    h: Any
    b_q: Any
    b_k: Any
    h_kv: Any
    tile: Any
    first_run: Any
    end_run: Any
    blocks: Any
    seqlen_q: Any
    seqlen_k: Any
    start_q: Any
    start_k: Any


@attrs.frozen(eq=False)
class Run:
    """Consecutive key tiles, with the kind of each tile packed two bits a query tile."""

    first: Any
    end: Any
    kinds: Any


FIELDS = len(attrs.fields(Item))
RUN_FIELDS = len(attrs.fields(Run))


class Plan(Fixed):
    """A role's view of the plan: `count` work tiles, which a work source hands out.

    `items` and `runs` are indexed as `table[row, field]`: device tensors, or lists of tuples in the
    checker through `rows`. `source` makes a role's end of the work source from its endpoints.
    """

    def __init__(self, items: Any, runs: Any, count: Any, source: Callable[[Ends], Any]):
        self.items, self.runs, self.count, self.source = items, runs, count, source

    def item(self, index: Any) -> Item:
        return Item(*(self.items[index, i] for i in range(FIELDS)))

    def run(self, index: Any) -> Run:
        return Run(*(self.runs[index, i] for i in range(RUN_FIELDS)))

    def end(self, run: Run, t: Any, partial: bool) -> Any:
        """Where the run ends for query tile `t` if it is of this kind; else `run.first`."""
        full = ((run.kinds >> (2 * t)) & 3) // FULL  # arithmetic: a device value can't branch here
        return run.first + (run.end - run.first) * (1 - full if partial else full)


def tables(
    problem: Problem, tiles: TileMap, side: int, order: Order = "longest_first"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plan of a problem: items (n, 13) and runs (m, 3), int32.

    Args:
        problem: Sizes.
        tiles: The mask's tile map, 128 x 128.
        side: Query tiles side by side.
        order: In which CTAs take work tiles; by the number of their key blocks.
    """
    items: list[Item] = []
    runs: list[tuple[int, int, int]] = []
    for b in range(problem.batch):
        for h in range(problem.heads_q):
            for tile in range(-(-tiles.tiles_q(b) // side)):
                first = len(runs)
                runs += merged_runs(tiles, b, h, tile, side)
                blocks = sum(end - start for start, end, _ in runs[first:])
                items.append(
                    Item(
                        b=b,
                        h=h,
                        b_q=b if problem.starts_q is None else 0,
                        b_k=b if problem.starts_k is None else 0,
                        h_kv=h // problem.group,
                        tile=tile,
                        first_run=first,
                        end_run=len(runs),
                        blocks=blocks,
                        seqlen_q=problem.seqlens_q[b],
                        seqlen_k=problem.seqlens_k[b],
                        start_q=0 if problem.starts_q is None else problem.starts_q[b],
                        start_k=0 if problem.starts_k is None else problem.starts_k[b],
                    )
                )
    if order != "in_order":
        items.sort(key=lambda item: item.blocks, reverse=order == "longest_first")
    rows = [attrs.astuple(i) for i in items] or [(0,) * FIELDS]
    return (
        torch.tensor(rows, dtype=torch.int32)[: len(items)],
        torch.tensor(runs or [(0, 0, 0)], dtype=torch.int32),
    )


def merged_runs(tiles: TileMap, b: int, h: int, tile: int, side: int) -> list[tuple[int, int, int]]:
    """Runs that the query tiles side by side visit together.

    A key tile that only one of them needs is PARTIAL for the other: its mask is false there. The
    last key tile is never FULL where the sequence ends inside it. A query tile behind the last one
    is FULL elsewhere, so that no mask is evaluated for it.
    """
    columns = tiles.tiles_k(b)
    kinds = np.zeros((side, columns), np.int64)
    for t in range(side):
        if tile * side + t < tiles.tiles_q(b):
            visited, kind = tiles.row(b, h, tile * side + t)
            kinds[t, visited] = kind
        else:
            kinds[t] = np.where(kinds[0] == EMPTY, EMPTY, FULL)  # nobody wants what it computes
    if tiles.seqlens_k[b] % TILE and columns:
        last = kinds[:, -1]
        last[last == FULL] = PARTIAL
    visited = (kinds != EMPTY).any(0)
    kinds[:, visited] = np.where(kinds[:, visited] == EMPTY, PARTIAL, kinds[:, visited])
    packed = sum(kinds[t] << (2 * t) for t in range(side))
    edges = np.flatnonzero(np.diff(np.concatenate([[-1], packed, [-1]])))
    return [(int(a), int(z), int(packed[a])) for a, z in itertools.pairwise(edges) if visited[a]]
