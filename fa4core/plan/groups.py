"""Tile maps of groups of heads: what packed query heads visit together.

The kernels' packed rows and the cost model use it. A key tile is EMPTY for a group if no head of it
attends there, and FULL only if every head attends to all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np

from fa4core.plan.kinds import FULL, PARTIAL
from fa4core.plan.runs import assemble
from fa4core.plan.tiles import TileMap, tile_map
from primitives.expr import Node, algebra, substitute


def any_of_group(mask: Node, group: int) -> Node:
    """The mask of a group: whether any of its heads attends. Its `h` is the group's number."""
    return _of_group(mask, group, algebra.logical_or)


def all_of_group(mask: Node, group: int) -> Node:
    """Whether every head of a group attends."""
    return _of_group(mask, group, algebra.logical_and)


def _of_group(mask: Node, group: int, joined: Callable[..., Node]) -> Node:
    if group == 1 or "h" not in mask.free:
        return mask
    head = algebra.var("h")
    heads = [algebra.add(algebra.mul(head, group), i) for i in range(group)]
    return joined(*(substitute([mask], {head: h})[0] for h in heads))


def group_map(
    mask: Node,
    group: int,
    *,
    batch: int,
    heads: int,
    seqlens_q: Sequence[int],
    seqlens_k: Sequence[int],
    tile_q: int,
    tile_k: int = 128,
) -> TileMap:
    """The tile map whose heads are groups of `group` heads; other arguments as `tile_map`'s."""

    def of(joined: Node) -> TileMap:
        return tile_map(
            joined, batch=batch, heads=heads // group, seqlens_q=seqlens_q, seqlens_k=seqlens_k,
            tile_q=tile_q, tile_k=tile_k,
        )  # fmt: skip

    visited = of(any_of_group(mask, group))
    if group == 1 or "h" not in mask.free:
        return visited
    return _full_where(visited, of(all_of_group(mask, group)))


def _full_where(visited: TileMap, full: TileMap) -> TileMap:
    """`visited`, FULL where `full` is FULL and PARTIAL elsewhere."""
    pairs = np.stack([m.stored_map.reshape(-1) for m in (visited, full)], axis=1)
    _, first, group = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
    rows: list[np.ndarray] = [np.zeros((0, 4), np.int64)]
    first_row = [0]
    for place in first.tolist():
        b, h = divmod(place, visited.heads)
        kinds = np.minimum(visited.dense(b, h), PARTIAL)
        kinds[(kinds == PARTIAL) & (full.dense(b, h) == FULL)] = FULL
        rows.append(_pieces(kinds, first_row[-1]))
        first_row.append(first_row[-1] + len(kinds))
    row, start, end, kind = np.concatenate(rows).T
    return attrs.evolve(
        visited,
        group=group.reshape(visited.batch, visited.heads),
        first_row=np.array(first_row),
        runs=assemble(row, start, end, kind, first_row[-1]),
    )


def _pieces(kinds: np.ndarray, first_row: int) -> np.ndarray:
    """(row, start, end, kind) of every visited tile, in order."""
    row, column = np.nonzero(kinds)
    return np.stack([row + first_row, column, column + 1, kinds[row, column]], axis=1)
