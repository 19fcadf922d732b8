"""What the bounds of whole tiles leave open: decided by parts of tiles and by single elements.

In order of cost, each for the tiles that are still open: a few elements; bounds of 16 parts; a few
elements of those parts that are open; bounds of their parts; every element of what is open then.
A true and a false element prove a tile partial; parts that are all empty or all full prove the tile
empty or full. Used by `classify` only.
"""

from __future__ import annotations

import numpy as np

from fa4core.lowering.ranges import Range
from fa4core.plan.axis import FACTOR, TILE
from fa4core.plan.boxes import Analysis, Boxes, joined
from fa4core.plan.kinds import EMPTY, FULL, PARTIAL

_CHUNK = 1 << 16  # elements evaluated at once
_SLICE = 1 << 14  # tiles that go through all stages together
_WORTH_WHILE = 0.01  # share of tiles that must turn out empty or full to go on
_PROBES = 4  # elements probed on each axis


class Budget:
    """How many elements may still be evaluated."""

    def __init__(self, elements: int) -> None:
        self.left = elements

    def afford(self, count: int, each: int) -> int:
        """How many of `count` evaluations of `each` elements are allowed; they are paid for."""
        allowed = min(count, self.left // each)
        self.left -= allowed * each
        return allowed


class _State:
    """What is known of each tile: whether a true, a false and an unknown element were seen.

    An element is unknown where a captured tensor is indexed outside, or where float rounding may
    decide: such a tile can be PARTIAL only.
    """

    def __init__(self, count: int, budget: Budget) -> None:
        self.true = np.zeros(count, bool)
        self.false = np.zeros(count, bool)
        self.unknown = np.zeros(count, bool)
        self.budget = budget

    @property
    def open(self) -> np.ndarray:
        return ~(self.true & self.false | self.unknown)

    def see(self, owner: np.ndarray, r: Range) -> None:
        """Take in elements (queries, keys, n) of the tiles `owner`, which may repeat."""
        self.true[owner[r.lo.any(axis=(0, 1))]] = True
        self.false[owner[~r.hi.all(axis=(0, 1))]] = True
        self.unknown[owner[(r.hi & ~r.lo).any(axis=(0, 1))]] = True


def resolve(analysis: Analysis, tiles: Boxes, budget: Budget) -> np.ndarray:
    """The kind of every tile; PARTIAL where the budget does not suffice to decide.

    Tiles are taken in slices, each spread over all of them. If the first slices decide next to
    nothing (a mask without structure), the rest is not tried: PARTIAL is sound.
    """
    kind = np.full(len(tiles), PARTIAL)
    slices = -(-len(tiles) // _SLICE)
    tried = 0
    for n in range(slices):
        kind[n::slices] = _resolve(analysis, tiles.select(slice(n, None, slices)), budget)
        tried += len(kind[n::slices])
        if np.count_nonzero(kind != PARTIAL) < tried * _WORTH_WHILE:
            break
    return kind


def _resolve(analysis: Analysis, tiles: Boxes, budget: Budget) -> np.ndarray:
    state = _State(len(tiles), budget)
    owner = np.arange(len(tiles))
    _probe(analysis, state, tiles, owner)
    parts, part_owner = _split(analysis, state, tiles, owner)
    _probe(analysis, state, parts, part_owner)
    parts, part_owner = _split(analysis, state, parts, part_owner)
    keep = state.open[part_owner]
    _elements(analysis, state, parts.select(keep), part_owner[keep])
    kind = np.full(len(tiles), PARTIAL)
    kind[state.open & state.true] = FULL
    kind[state.open & ~state.true] = EMPTY
    return kind


def _probe(analysis: Analysis, state: _State, boxes: Boxes, owner: np.ndarray) -> None:
    """Evaluate a few elements, corners included, of boxes of tiles that are open."""
    which = np.flatnonzero(state.open[owner])
    which = which[: state.budget.afford(len(which), _PROBES * _PROBES)]
    # uneven distances, so that a regular pattern of the mask cannot hide between them
    place = np.linspace(0, 1, _PROBES) ** 1.17
    for start in range(0, len(which), _CHUNK // _PROBES**2):
        now = which[start : start + _CHUNK // _PROBES**2]
        now = now[state.open[owner[now]]]
        chosen = boxes.select(now)
        at = []
        for axis in ("q", "k"):
            first, end = analysis.extent(chosen, axis)
            at.append(first + np.rint((end - 1 - first) * place[:, None]).astype(np.int64))
        state.see(owner[now], analysis.points(chosen.group, at[0], at[1]))


def _split(
    analysis: Analysis, state: _State, boxes: Boxes, owner: np.ndarray
) -> tuple[Boxes, np.ndarray]:
    """Split boxes of tiles that are open; returns the parts still open, and their tiles."""
    keep = np.flatnonzero(state.open[owner])
    allowed = state.budget.afford(len(keep), FACTOR * FACTOR)
    state.unknown[owner[keep[allowed:]]] = True  # given up on
    boxes, owner = boxes.select(keep[:allowed]), owner[keep[:allowed]]
    kept_boxes: list[Boxes] = [Boxes(boxes.level - 1, *[np.zeros(0, np.int64)] * 3)]
    kept_owner: list[np.ndarray] = [np.zeros(0, np.int64)]
    size = max(1, _CHUNK // FACTOR**2)
    for start in range(0, len(boxes), size):
        chunk, chunk_owner = boxes.select(slice(start, start + size)), owner[start : start + size]
        parts = analysis.children(chunk)
        # children of the parts of one tile keep their tile: there are FACTOR^2 of each
        part_owner = np.repeat(chunk_owner, FACTOR * FACTOR)
        present = analysis.filled(parts)
        parts, part_owner = parts.select(present), part_owner[present]
        r = analysis.bound(parts)
        state.true[part_owner[r.lo]] = True
        state.false[part_owner[~r.hi]] = True
        keep = r.hi & ~r.lo
        kept_boxes.append(parts.select(keep))
        kept_owner.append(part_owner[keep])
    return joined(kept_boxes), np.concatenate(kept_owner)


def _elements(analysis: Analysis, state: _State, parts: Boxes, owner: np.ndarray) -> None:
    """Evaluate every element of the parts."""
    (q, q_end), (k, k_end) = (analysis.extent(parts, axis) for axis in ("q", "k"))
    # parts of like shape together, in arrays of the largest of a batch; small ones first
    order = np.lexsort((k_end - k, q_end - q))
    cost = np.cumsum((q_end - q)[order] * (k_end - k)[order])
    allowed = int(np.searchsorted(cost, state.budget.left, side="right"))
    state.budget.left -= int(cost[allowed - 1]) if allowed else 0
    state.unknown[owner[order[allowed:]]] = True
    start = 0
    while start < allowed:
        largest = int(cost[start] - (cost[start - 1] if start else 0))
        now = order[start : min(allowed, start + max(1, _CHUNK // largest))]
        largest = int((q_end - q)[now].max() * (k_end - k)[now].max())
        now = now[: max(1, _CHUNK // largest)]
        start += len(now)
        now = now[state.open[owner[now]]]
        if len(now) == 0:
            continue
        rows, columns = (
            np.minimum(first[now] + np.arange((end - first)[now].max())[:, None], end[now] - 1)
            for first, end in ((q, q_end), (k, k_end))
        )
        state.see(owner[now], analysis.points(parts.group[now], rows, columns))


assert TILE == 2  # `resolve` splits a tile exactly twice
