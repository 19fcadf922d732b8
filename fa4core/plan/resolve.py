"""What the bounds of whole tiles leave open: decided by parts of tiles and by single elements.

In order of cost, each for the tiles that are still open: a few elements; bounds of 16 parts; a few
elements of those parts that are open; bounds of their parts; every element of what is open then.
A true and a false element prove a tile partial; parts that are all empty or all full prove the tile
empty or full. Used by `classify` only.
"""

from __future__ import annotations

import numpy as np

from fa4core.plan.axis import FACTOR, TILE
from fa4core.plan.boxes import Analysis, Boxes, joined
from fa4core.plan.kinds import EMPTY, FULL, PARTIAL

_CHUNK = 1 << 16  # elements evaluated at once
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
    """What is known of each tile: whether a true and a false element were seen."""

    def __init__(self, count: int, budget: Budget) -> None:
        self.true = np.zeros(count, bool)
        self.false = np.zeros(count, bool)
        self.budget = budget

    @property
    def open(self) -> np.ndarray:
        return ~(self.true & self.false)


def resolve(analysis: Analysis, tiles: Boxes, budget: Budget) -> np.ndarray:
    """The kind of every tile; PARTIAL where the budget does not suffice to decide."""
    state = _State(len(tiles), budget)
    kind = np.full(len(tiles), PARTIAL)
    if len(tiles) == 0:
        return kind
    owner = np.arange(len(tiles))
    _probe(analysis, state, tiles, owner)
    parts, part_owner, dropped = _split(analysis, state, tiles, owner)
    _probe(analysis, state, parts, part_owner)
    parts, part_owner, more = _split(analysis, state, parts, part_owner)
    dropped |= more
    keep = state.open[part_owner]
    parts, part_owner = parts.select(keep), part_owner[keep]
    unknown = _elements(analysis, state, parts, part_owner) | dropped
    decided = state.open & ~unknown
    kind[decided & state.true] = FULL
    kind[decided & ~state.true] = EMPTY
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
        r = analysis.points(chosen.group, at[0], at[1])
        state.true[owner[now[r.lo.any(axis=(0, 1))]]] = True
        state.false[owner[now[~r.hi.all(axis=(0, 1))]]] = True


def _split(
    analysis: Analysis, state: _State, boxes: Boxes, owner: np.ndarray
) -> tuple[Boxes, np.ndarray, np.ndarray]:
    """Split open boxes; returns the parts still open, their tiles, and the tiles given up on."""
    dropped = np.zeros(len(state.true), bool)
    keep = np.flatnonzero(state.open[owner])
    allowed = state.budget.afford(len(keep), FACTOR * FACTOR)
    dropped[owner[keep[allowed:]]] = True
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
    return joined(kept_boxes), np.concatenate(kept_owner), dropped


def _elements(analysis: Analysis, state: _State, parts: Boxes, owner: np.ndarray) -> np.ndarray:
    """Evaluate every element of the parts; returns the tiles that stay unknown."""
    unknown = np.zeros(len(state.true), bool)
    (q, q_end), (k, k_end) = (analysis.extent(parts, axis) for axis in ("q", "k"))
    # parts of like shape together, in arrays of the largest of a batch; small ones first
    order = np.lexsort((k_end - k, q_end - q))
    cost = np.cumsum((q_end - q)[order] * (k_end - k)[order])
    allowed = int(np.searchsorted(cost, state.budget.left, side="right"))
    state.budget.left -= int(cost[allowed - 1]) if allowed else 0
    unknown[owner[order[allowed:]]] = True
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
        r = analysis.points(parts.group[now], rows, columns)
        state.true[owner[now[r.lo.any(axis=(0, 1))]]] = True
        state.false[owner[now[~r.hi.all(axis=(0, 1))]]] = True
        unknown[owner[now[(r.hi & ~r.lo).any(axis=(0, 1))]]] = True
    return unknown


assert TILE == 2  # `resolve` splits a tile exactly twice
