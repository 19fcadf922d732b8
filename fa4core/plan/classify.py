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
from fa4core.plan.resolve import resolve

_CHUNK = 1 << 16  # boxes bounded at once
_MOST = 1 << 22  # beyond this many boxes a level is not split further: what is open stays PARTIAL


@attrs.frozen(eq=False)
class Rectangles:
    """Rectangles of tiles of one kind: rows `[i, i_end)`, columns `[j, j_end)`."""

    group: np.ndarray
    i: np.ndarray
    i_end: np.ndarray
    j: np.ndarray
    j_end: np.ndarray
    kind: np.ndarray


def classify(analysis: Analysis, exact_budget: int) -> Rectangles:
    """All full and partial tiles of an analysis, as disjoint rectangles in no particular order.

    `exact_budget` limits the elements evaluated to decide tiles that bounds leave open.
    """
    found: list[tuple[Boxes, np.ndarray]] = []
    boxes = coarsest(analysis)
    while len(boxes):
        full, unresolved = [], []
        for chunk in boxes.chunks(_CHUNK):
            r = analysis.bound(chunk)
            full.append(chunk.select(r.lo))
            unresolved.append(chunk.select(r.hi & ~r.lo))
        for part in full:
            found.append((part, np.full(len(part), FULL)))
        open_boxes = joined(unresolved)
        if boxes.level == TILE:
            found.append((open_boxes, resolve(analysis, open_boxes, exact_budget)))
            break
        if len(open_boxes) * FACTOR**2 > _MOST:
            found.append((open_boxes, np.full(len(open_boxes), PARTIAL)))
            break
        boxes = analysis.children(open_boxes)
    return _rectangles(analysis, found)


def _rectangles(analysis: Analysis, found: list[tuple[Boxes, np.ndarray]]) -> Rectangles:
    tiles_q, tiles_k = analysis.groups.tiles(analysis.tile["q"], analysis.tile["k"])
    columns: list[list[np.ndarray]] = [[] for _ in range(6)]
    for boxes, kind in found:
        keep = kind != EMPTY
        group, i, j = boxes.group[keep], boxes.i[keep], boxes.j[keep]
        size = FACTOR ** (boxes.level - TILE)
        i_end = np.minimum((i + 1) * size, tiles_q[group])
        j_end = np.minimum((j + 1) * size, tiles_k[group])
        for column, values in zip(
            columns, (group, i * size, i_end, j * size, j_end, kind[keep]), strict=True
        ):
            column.append(values)
    empty = np.zeros(0, np.int64)
    return Rectangles(*(np.concatenate([empty, *c]) for c in columns))
