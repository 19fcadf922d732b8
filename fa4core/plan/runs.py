"""Runs: rows of a tile map as piecewise constant functions, merged and transposed.

Used by `tiles` only. Everything is proportional to runs, never to tiles.
"""

from __future__ import annotations

import attrs
import numpy as np

from fa4core.plan.classify import Rectangles
from fa4core.plan.kinds import EMPTY, FULL, PARTIAL


@attrs.frozen(eq=False)
class Runs:
    """Row `r` has the runs `pointer[r]` to `pointer[r + 1]`: `start`, `end` (int32), `kind` (int8).

    Runs of a row are disjoint, ascending, as long as possible, and not EMPTY.
    """

    pointer: np.ndarray
    start: np.ndarray
    end: np.ndarray
    kind: np.ndarray


def assemble(
    row: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
    kind: np.ndarray,
    rows: int,
    dtype: type = np.int8,
) -> Runs:
    """Runs from pieces in order of row and start, adjacent pieces of one kind joined."""
    joins = (row[1:] == row[:-1]) & (kind[1:] == kind[:-1]) & (start[1:] == end[:-1])
    first = np.flatnonzero(np.concatenate([[True], ~joins])) if len(row) else np.zeros(0, int)
    last = np.append(first[1:], len(row)) - 1 if len(row) else first
    pointer = np.searchsorted(row[first], np.arange(rows + 1))
    return Runs(
        pointer,
        start[first].astype(np.int32),
        end[last].astype(np.int32),
        kind[first].astype(dtype),
    )


def side_by_side(
    runs: Runs,
    first_row: np.ndarray,
    columns: np.ndarray,
    ragged: np.ndarray,
    cut: np.ndarray | None,
    side: int,
) -> tuple[np.ndarray, Runs]:
    """Rows in groups of `side`: the runs that any of them visits, see `TileMap.side_by_side`.

    Args:
        runs: Of all stored maps; those of map `g` begin at row `first_row[g]`.
        columns: Of each map.
        ragged: Whether the last column of each map is cut short.
        cut: Whether the last row of each map is. Nothing is FULL then in it, nor in the rows that
            fill up a group. None: rows don't matter.
        side: Rows of a group.

    Returns:
        Where the groups of each map begin, and their runs.
    """
    rows = np.diff(first_row)
    first = np.concatenate([[0], np.cumsum(-(-rows // side))])
    of_row = np.repeat(np.arange(len(rows)), rows)
    within = np.arange(len(of_row)) - first_row[of_row]
    visits = np.diff(runs.pointer)
    group = np.repeat(first[of_row] + within // side, visits)
    value = runs.kind.astype(np.int64) << np.repeat(within % side * 2, visits)
    of_group = np.repeat(np.arange(len(rows)), np.diff(first))
    last_column = np.flatnonzero(ragged[of_group] & (columns[of_group] > 0))
    # what all rows of a group visit together changes where any row's runs begin or end
    key = np.concatenate(
        [
            group << 32 | runs.start,
            group << 32 | runs.end,
            last_column << 32 | columns[of_group[last_column]] - 1,
        ]
    )
    change = np.concatenate([value, -value, np.zeros(len(last_column), np.int64)])
    order = np.argsort(key, kind="stable")
    key, kinds = key[order], np.cumsum(change[order])
    last = np.flatnonzero(np.append(key[1:] != key[:-1], True)[: len(key)])
    key, kinds = key[last], kinds[last]
    group, start = key >> 32, key & 0xFFFFFFFF
    end = np.append(start[1:], 0)[: len(start)]
    seen = kinds != 0
    group, start, end, kinds = group[seen], start[seen], end[seen], kinds[seen]
    of = of_group[group]
    there = rows[of] - (group - first[of]) * side  # rows of the group that exist
    short = ragged[of] & (start == columns[of] - 1)
    packed = _packed(kinds, there, short, None if cut is None else cut[of], side)
    return first, assemble(group, start, end, packed, int(first[-1]), np.int32)


def _packed(
    kinds: np.ndarray, there: np.ndarray, short: np.ndarray, cut: np.ndarray | None, side: int
) -> np.ndarray:
    """Kinds of columns that are visited: rows that don't need one have a false mask there, and
    nothing is FULL where the column is cut short. Rows that don't exist need no mask, unless rows
    may be cut short."""
    packed = np.zeros_like(kinds)
    for t in range(side):
        kind = kinds >> 2 * t & 3
        kind = np.where(kind == EMPTY, np.where(t < there, PARTIAL, FULL), kind)
        outside = short if cut is None else short | (cut & (t == there - 1)) | (t >= there)
        packed |= np.where(outside & (kind == FULL), PARTIAL, kind) << 2 * t
    return packed


def merge(rectangles: Rectangles, first_row: np.ndarray) -> Runs:
    """The runs of disjoint rectangles; the rows of group `g` begin at `first_row[g]`."""
    height = rectangles.i_end - rectangles.i
    piece = np.repeat(np.arange(len(height)), height)
    within = np.arange(len(piece)) - np.repeat(np.cumsum(height) - height, height)
    row = first_row[rectangles.group[piece]] + rectangles.i[piece] + within
    start = rectangles.j[piece]
    order = np.argsort(row << 32 | start)
    piece = piece[order]
    return assemble(
        row[order],
        start[order],
        rectangles.j_end[piece],
        rectangles.kind[piece],
        int(first_row[-1]),
    )


def transpose(runs: Runs, first_row: np.ndarray, first_column: np.ndarray) -> Runs:
    """The runs of every group's transposed map; its columns become the rows `first_column[g]`...

    A column's kind changes only where two consecutive rows differ, so rows are compared pairwise
    and each difference is expanded over its columns: time is proportional to the result.
    """
    groups = np.repeat(np.arange(len(first_row) - 1), np.diff(first_row))
    column, row, kind = _changes(runs, groups, first_row, first_column)
    order = np.argsort(column << 32 | row)
    column, row, kind = column[order], row[order], kind[order]
    end = np.append(row[1:], 0)[: len(row)]
    last = np.flatnonzero(np.append(column[1:] != column[:-1], True)[: len(column)])
    group = np.searchsorted(first_column, column, side="right") - 1
    end[last] = np.diff(first_row)[group[last]]
    keep = kind != EMPTY
    return assemble(column[keep], row[keep], end[keep], kind[keep], int(first_column[-1]))


def _changes(
    runs: Runs, groups: np.ndarray, first_row: np.ndarray, first_column: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every (column, row in the group, new kind) where a row's kind differs from the row before."""
    rows = len(groups)
    width = np.diff(first_column)
    row = np.repeat(np.arange(rows), np.diff(runs.pointer))
    # pieces of each row with their kind, and EMPTY after each (a following run overrides it)
    at = np.concatenate([np.arange(rows), row, row])
    begin = np.concatenate([np.zeros(rows, np.int64), runs.start, runs.end])
    kind = np.concatenate([np.zeros(rows + len(row), np.int8), np.zeros(len(row), np.int8)])
    kind[rows : rows + len(row)] = runs.kind
    rank = np.concatenate([np.zeros(rows, np.int8), np.full(len(row), 2), np.ones(len(row))])
    keep = begin < width[groups[at]]
    at, begin, kind, rank = at[keep], begin[keep], kind[keep], rank[keep].astype(np.int8)
    # each row's pieces take part twice: as the row itself and as the row before the next
    follows = np.concatenate([groups[1:] == groups[:-1], [False]]) if rows else np.zeros(0, bool)
    before = follows[at]
    pair = np.concatenate([at, at[before] + 1])
    edge = np.concatenate([begin, begin[before]])
    side = np.concatenate([np.ones(len(at), np.int8), np.zeros(int(before.sum()), np.int8)])
    value = np.concatenate([kind, kind[before]])
    order = np.lexsort((np.concatenate([rank, rank[before]]), edge, pair))
    pair, edge, side, value = pair[order], edge[order], side[order], value[order]
    new, old = _current(pair, side == 1, value), _current(pair, side == 0, value)
    following = np.append((pair[1:] == pair[:-1]), False) if len(pair) else np.zeros(0, bool)
    stop = np.where(following, np.append(edge[1:], 0), width[groups[pair]] if len(pair) else 0)
    differs = (new != old) & (stop > edge)
    pair, edge, stop, new = pair[differs], edge[differs], stop[differs], new[differs]
    count = stop - edge
    column = np.repeat(stop - np.cumsum(count), count) + np.arange(int(count.sum()))
    group = groups[pair]
    return (
        column + np.repeat(first_column[group], count),
        np.repeat(pair - first_row[group], count),
        np.repeat(new, count),
    )


def _current(pair: np.ndarray, own: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The latest value of the entries `own` within each pair; EMPTY before the first."""
    index = np.where(own, np.arange(len(pair)), -1)
    latest = np.maximum.accumulate(index) if len(index) else index
    known = (latest >= 0) & (pair[np.maximum(latest, 0)] == pair)
    return np.where(known, value[np.maximum(latest, 0)], EMPTY)
