"""Runs of all query heads of a KV head, and whose turn it is to add to dQ. `tables` uses it."""

from __future__ import annotations

import attrs
import numpy as np

from fa4core.plan.runs import Runs


@attrs.frozen(eq=False)
class Joined:
    """Rows of runs, one for each tile of keys of each distinct KV head.

    Attributes:
        runs: Of query tiles; those of the group's heads one behind the other.
        head: (runs,) the query head of each run within its group.
        map: (rows,) which distinct KV head a row belongs to.
        tile: (rows,) its tile of keys.
        turn, step: (runs,) see `work.Run`.
    """

    runs: Runs
    head: np.ndarray
    map: np.ndarray
    tile: np.ndarray
    turn: np.ndarray | int = 0
    step: np.ndarray | int = 0

    @property
    def row(self) -> np.ndarray:
        """(runs,) the row that each run belongs to."""
        return np.repeat(np.arange(len(self.tile)), np.diff(self.runs.pointer))


def joined(
    first: np.ndarray, runs: Runs, tiles: np.ndarray, group: int
) -> tuple[np.ndarray, Joined]:
    """The runs of KV heads.

    Args:
        first: (batch, heads_q) the first row of runs of each query head.
        runs: Of query heads.
        tiles: (batch,) rows of each: tiles of keys.
        group: Query heads of a KV head.

    Returns:
        The first row of each KV head, (batch, heads_kv), and the rows.
    """
    batch, heads = first.shape
    count = np.repeat(tiles, heads // group)
    of_heads = first.reshape(len(count), group)
    distinct, which = np.unique(np.column_stack([count, of_heads]), axis=0, return_inverse=True)
    rows = distinct[:, 0]
    begin = np.cumsum(rows) - rows
    map_ = np.repeat(np.arange(len(rows)), rows)
    tile = np.arange(len(map_)) - begin[map_]
    source = (distinct[map_, 1:] + tile[:, None]).reshape(-1)  # of every row and head
    size = np.diff(runs.pointer)[source]
    at = np.repeat(runs.pointer[source] - (np.cumsum(size) - size), size) + np.arange(size.sum())
    head = np.repeat(np.tile(np.arange(group), len(map_)), size)
    pointer = np.concatenate([[0], np.cumsum(size.reshape(len(map_), group).sum(1))])
    found = Runs(pointer, runs.start[at], runs.end[at], runs.kind[at])
    return begin[which].reshape(batch, heads // group), Joined(found, head, map_, tile)


def with_turns(given: Joined) -> Joined:
    """Runs cut so that along each the number of earlier shares grows step by step.

    The last tile of keys goes first. So with a causal mask it is the number of the query tile that
    grows, and workers that begin together at their diagonals never wait.
    """
    runs, row = given.runs, given.row
    size = (runs.end - runs.start).astype(np.int64)
    run = np.repeat(np.arange(len(size)), size)
    column = np.arange(len(run)) - (np.cumsum(size) - size - runs.start)[run]
    map_, tile = given.map[row][run], given.tile[row][run]
    order = np.lexsort([-tile, column, given.head[run], map_])
    same = np.stack([map_, given.head[run], column])[:, order]
    begins = np.append(True, (same[:, 1:] != same[:, :-1]).any(0))[: len(run)]
    begin = np.maximum.accumulate(np.where(begins, np.arange(len(run)), 0))
    turn = np.empty(len(run), np.int64)
    turn[order] = np.arange(len(run)) - begin
    is_first = np.append(True, run[1:] != run[:-1])[: len(run)]
    grows = np.where(is_first, 0, np.diff(turn, prepend=0))
    behind_first = np.append(False, is_first[:-1])[: len(run)]
    cut = is_first | (~behind_first & (grows != np.append(0, grows[:-1])[: len(run)]))
    piece = np.flatnonzero(cut)
    end = np.append(piece[1:], len(run))[: len(piece)] - 1
    step = np.where(end > piece, grows[np.minimum(piece + 1, len(run) - 1)], 0)
    of = run[piece]
    pointer = np.searchsorted(row[of], np.arange(len(given.tile) + 1))
    cut_runs = Runs(
        pointer,
        column[piece].astype(np.int32),
        (column[end] + 1).astype(np.int32),
        runs.kind[of],
    )
    return attrs.evolve(given, runs=cut_runs, head=given.head[of], turn=turn[piece], step=step)
