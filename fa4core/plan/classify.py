"""Classification of (query tile, key tile) pairs as empty, partial or full.

Boxes of many tiles are bounded first; those that are neither empty nor full are split in 4 x 4,
down to tiles, so that the work is proportional to boundaries. Tiles that bounds leave open go to
`resolve`. EMPTY and FULL are proofs. Used by `tiles`.
"""

from __future__ import annotations

import attrs
import numpy as np

from fa4core.plan.axis import FACTOR, TILE
from fa4core.plan.boxes import Analysis, Boxes, coarsest, joined
from fa4core.plan.kinds import EMPTY, FULL, PARTIAL
from fa4core.plan.resolve import Budget, resolve

_CHUNK = 1 << 15  # boxes bounded at once
_MOST = 1 << 18  # boxes split at once: bounds memory; more are split only if it promises to help
_SAMPLE = 1 << 12
_OPEN_SHARE = 0.98


@attrs.frozen(eq=False)
class Rectangles:
    """Rectangles of tiles of one kind: rows `[i, i_end)`, columns `[j, j_end)`."""

    group: np.ndarray
    i: np.ndarray
    i_end: np.ndarray
    j: np.ndarray
    j_end: np.ndarray
    kind: np.ndarray


def classify(analysis: Analysis, budget: Budget) -> Rectangles:
    """All full and partial tiles of an analysis, as disjoint rectangles in no particular order.

    `budget` limits the elements evaluated to decide tiles that bounds leave open.
    """
    found: list[tuple[Boxes, np.ndarray]] = []
    pending = list(coarsest(analysis).chunks(_MOST))
    while pending:
        boxes = pending.pop()
        open_boxes = _bound(analysis, boxes, found)
        if boxes.level == TILE:
            found.append((open_boxes, resolve(analysis, open_boxes, budget)))
        elif len(open_boxes) * FACTOR**2 > _MOST and _hopeless(analysis, open_boxes):
            found.append((open_boxes, np.full(len(open_boxes), PARTIAL)))
        else:
            parts = open_boxes.chunks(_MOST)
            pending += [analysis.children(part) for part in parts]
    return _rectangles(analysis, found)


def _bound(analysis: Analysis, boxes: Boxes, found: list[tuple[Boxes, np.ndarray]]) -> Boxes:
    """Bound boxes; the full ones are added to `found`, the open ones returned."""
    unresolved = []
    for chunk in boxes.chunks(_CHUNK):
        r = analysis.bound(chunk)
        full = chunk.select(r.lo)
        found.append((full, np.full(len(full), FULL)))
        unresolved.append(chunk.select(r.hi & ~r.lo))
    return joined(unresolved)


def _hopeless(analysis: Analysis, boxes: Boxes) -> bool:
    """Whether a sample of single tiles of these boxes is open almost throughout.

    Then splitting millions of boxes would find next to nothing; leaving them PARTIAL is sound.
    """
    rng = np.random.default_rng(0)
    some = boxes.select(rng.integers(len(boxes), size=_SAMPLE))
    size = FACTOR ** (boxes.level - TILE)
    count_q, count_k = analysis.counts(TILE)
    i, j = (
        np.minimum(at * size + rng.integers(size, size=_SAMPLE), count[some.group] - 1)
        for at, count in ((some.i, count_q), (some.j, count_k))
    )
    r = analysis.bound(Boxes(TILE, some.group, i, j))
    return float(np.mean(r.hi & ~r.lo)) > _OPEN_SHARE


def _row_runs(boxes: Boxes, kind: np.ndarray) -> tuple[np.ndarray, ...]:
    """Boxes that are not EMPTY as runs in j: group, i, first j, last j, kind."""
    keep = np.flatnonzero(kind != EMPTY)
    order = keep[np.lexsort((boxes.j[keep], boxes.i[keep], boxes.group[keep]))]
    group, i, j, kind = boxes.group[order], boxes.i[order], boxes.j[order], kind[order]
    joins = (
        (group[1:] == group[:-1])
        & (i[1:] == i[:-1])
        & (kind[1:] == kind[:-1])
        & (j[1:] == j[:-1] + 1)
    )
    first = np.flatnonzero(np.append(True, ~joins)[: len(order)])
    last = np.append(first[1:], len(order))[: len(first)] - 1
    return group[first], i[first], j[first], j[last], kind[first]


def _rectangles(analysis: Analysis, found: list[tuple[Boxes, np.ndarray]]) -> Rectangles:
    tiles_q, tiles_k = analysis.groups.tiles(analysis.tile["q"], analysis.tile["k"])
    columns: list[list[np.ndarray]] = [[] for _ in range(6)]
    for boxes, kinds in found:
        size = FACTOR ** (boxes.level - TILE)
        group, i, j, j_last, kind = _row_runs(boxes, kinds)
        i_end = np.minimum((i + 1) * size, tiles_q[group])
        j_end = np.minimum((j_last + 1) * size, tiles_k[group])
        for column, values in zip(
            columns, (group, i * size, i_end, j * size, j_end, kind), strict=True
        ):
            column.append(values)
    empty = np.zeros(0, np.int64)
    return Rectangles(*(np.concatenate([empty, *c]) for c in columns))
