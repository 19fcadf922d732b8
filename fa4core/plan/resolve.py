"""What the bounds of whole tiles leave open: decided by parts of tiles and by single elements.

In order of cost, each for the tiles that are still open: a few elements; bounds of 16 parts; 256
elements; bounds of 256 parts; every element of the parts that are open. A true and a false element
prove a tile partial; parts that are all empty or all full prove the tile empty or full. Used by
`classify` only.
"""

from __future__ import annotations

import numpy as np

from fa4core.plan.axis import FACTOR, TILE, block_start
from fa4core.plan.boxes import Analysis, Boxes, joined
from fa4core.plan.kinds import EMPTY, FULL, PARTIAL

_CHUNK = 1 << 16  # elements evaluated at once
_PROBES = (4, 16)  # elements per axis, in the first and the second attempt


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
    _probe(analysis, state, tiles, owner, _PROBES[0])
    parts, part_owner, dropped = _split(analysis, state, tiles, owner)
    still_open = np.flatnonzero(np.bincount(part_owner, minlength=len(tiles)))
    _probe(analysis, state, tiles, still_open, _PROBES[1])
    keep = state.open[part_owner]
    parts, part_owner, more = _split(analysis, state, parts.select(keep), part_owner[keep])
    dropped |= more
    keep = state.open[part_owner]
    parts, part_owner = parts.select(keep), part_owner[keep]
    unknown = _elements(analysis, state, parts, part_owner) | dropped
    decided = state.open & ~unknown
    kind[decided & state.true] = FULL
    kind[decided & ~state.true] = EMPTY
    return kind


def _ends(analysis: Analysis, boxes: Boxes, axis: str) -> tuple[np.ndarray, np.ndarray]:
    """First index and end of each box on an axis, clipped to the sequence."""
    block = boxes.i if axis == "q" else boxes.j
    length = analysis.groups.columns[f"seqlen_{axis}"][boxes.group]
    tile = analysis.tile[axis]
    first = block_start(block, boxes.level, tile)
    return np.minimum(first, length), np.minimum(block_start(block + 1, boxes.level, tile), length)


def _probe(analysis: Analysis, state: _State, tiles: Boxes, which: np.ndarray, probes: int) -> None:
    """Evaluate `probes` x `probes` elements, corners included, of the tiles `which`."""
    which = which[: state.budget.afford(len(which), probes * probes)]
    # uneven distances, so that a regular pattern of the mask cannot hide between them
    place = np.linspace(0, 1, probes) ** 1.17
    for start in range(0, len(which), max(1, _CHUNK // probes**2)):
        chosen = which[start : start + max(1, _CHUNK // probes**2)]
        boxes = tiles.select(chosen)
        at = []
        for axis in ("q", "k"):
            first, end = _ends(analysis, boxes, axis)
            at.append(first[:, None] + np.rint((end - 1 - first)[:, None] * place).astype(np.int64))
        r = analysis.points(boxes.group, at[0], at[1])
        state.true[chosen] |= r.lo.any(axis=(1, 2))
        state.false[chosen] |= ~r.hi.all(axis=(1, 2))


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
        present = np.ones(len(parts), bool)
        for axis in ("q", "k"):
            first, end = _ends(analysis, parts, axis)
            present &= end > first
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
    sides = []
    for axis in ("q", "k"):
        first, end = _ends(analysis, parts, axis)
        sides.append((first, end - 1, int((end - first).max(initial=1))))
    (q, q_last, q_size), (k, k_last, k_size) = sides
    allowed = state.budget.afford(len(parts), q_size * k_size)
    unknown[owner[allowed:]] = True
    size = max(1, _CHUNK // (q_size * k_size))
    for start in range(0, allowed, size):
        now = np.arange(start, min(start + size, allowed))
        now = now[state.open[owner[now]]]
        rows = np.minimum(q[now, None] + np.arange(q_size), q_last[now, None])
        columns = np.minimum(k[now, None] + np.arange(k_size), k_last[now, None])
        r = analysis.points(parts.group[now], rows, columns)
        state.true[owner[now[r.lo.any(axis=(1, 2))]]] = True
        state.false[owner[now[~r.hi.all(axis=(1, 2))]]] = True
        unknown[owner[now[(r.hi & ~r.lo).any(axis=(1, 2))]]] = True
    return unknown


assert TILE == 2  # `resolve` splits a tile exactly twice
