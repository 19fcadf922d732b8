"""Boxes of tiles, and a mask's range over them: what the tile classification computes with.

An `Analysis` holds a mask's program, the sequences and heads ("groups") to analyse and the tables
of its leaves, and evaluates the mask over boxes (bounds) and at points, vectorised over groups.
Used by `classify` and `resolve`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
import numpy as np

from fa4core.lowering.bounds import Program, axes_of, evaluate, plain
from fa4core.lowering.ranges import Range
from fa4core.lowering.tables import Tables
from fa4core.plan.axis import FACTOR, TILE, Axis
from primitives.expr import Node
from primitives.expr import algebra as A

_FIRST = 1 << 12  # about as many boxes at the coarsest level

#: What a group fixes besides its index ranges.
VARIABLES = ("b", "h", "seqlen_q", "seqlen_k")


@attrs.frozen(eq=False)
class Groups:
    """Index values of the sequences and heads to classify, one entry a group.

    `columns` has int64 arrays of equal length for b, h, seqlen_q and seqlen_k.
    """

    columns: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.columns["b"])

    def select(self, index: np.ndarray | slice) -> Groups:
        return Groups({name: column[index] for name, column in self.columns.items()})

    def tiles(self, tile_q: int, tile_k: int) -> tuple[np.ndarray, np.ndarray]:
        return -(-self.columns["seqlen_q"] // tile_q), -(-self.columns["seqlen_k"] // tile_k)


@attrs.frozen(eq=False)
class Boxes:
    """Boxes of one level: `group`, and block indices `i` of queries and `j` of keys."""

    level: int
    group: np.ndarray
    i: np.ndarray
    j: np.ndarray

    def __len__(self) -> int:
        return len(self.group)

    def select(self, index: np.ndarray | slice) -> Boxes:
        return Boxes(self.level, self.group[index], self.i[index], self.j[index])

    def chunks(self, size: int) -> Iterator[Boxes]:
        for start in range(0, len(self), size):
            yield self.select(slice(start, start + size))


class Analysis:
    """A program over groups: its leaves' tables, and evaluation over boxes and points."""

    def __init__(
        self, program: Program, groups: Groups, tile_q: int, tile_k: int, tables: Tables
    ) -> None:
        self.program, self.groups, self.tables = program, groups, tables
        self.tile = {"q": tile_q, "k": tile_k}
        tiles_q, tiles_k = groups.tiles(tile_q, tile_k)
        self.top = TILE
        while _pairs(tiles_q, tiles_k, self.top) > max(_FIRST, len(groups)):
            self.top += 1
        self.axes: dict[str, Axis] = {}
        self.sequence: dict[str, np.ndarray] = {}
        for name in ("q", "k"):
            self._add_axis(name)
        self.fixed = group_values(program, groups, self.tables)

    def _add_axis(self, name: str) -> None:
        """Reduce the leaves of one axis; groups that agree in what these use share a sequence."""
        sides = [s for pair in self.program.equalities.values() for s in pair]
        leaves, sets = self.program.leaves[name], [s for s in sides if axes_of(s) == name]
        used = set().union(*(n.free for n in (*leaves, *sets))) & set(VARIABLES)
        names = sorted(used | {f"seqlen_{name}"})
        rows, sequence = np.unique(
            np.stack([self.groups.columns[n] for n in names]), axis=1, return_inverse=True
        )
        columns = dict(zip(names, rows, strict=True))
        axis = Axis(name, self.tile[name], columns[f"seqlen_{name}"], columns, self.top)
        axis.reduce(leaves, list(dict.fromkeys(sets)), self.tables)
        self.axes[name], self.sequence[name] = axis, sequence.reshape(-1)

    def bound(self, boxes: Boxes) -> Range:
        """The mask's three-valued range over boxes."""
        values = {leaf: _pick(r, boxes.group) for leaf, r in self.fixed.items()}
        present: dict[Node, np.ndarray] = {}
        for name, axis in self.axes.items():
            block = boxes.i if name == "q" else boxes.j
            sequence = self.sequence[name][boxes.group]
            values |= axis.ranges(boxes.level, sequence, block)
            present |= axis.signatures(boxes.level, sequence, block)
        differ = {
            node: (present[left] & present[right]) == 0
            for node, (left, right) in self.program.equalities.items()
        }
        return self._evaluate(values, differ, (len(boxes),))

    def points(self, group: np.ndarray, q: np.ndarray, k: np.ndarray) -> Range:
        """The mask at every pair of `q[:, n]` and `k[:, n]` of group `n`: (queries, keys, n)."""
        values = {leaf: _pick(r, group) for leaf, r in self.fixed.items()}
        for name, axis in self.axes.items():
            index = q[:, None] if name == "q" else k[None]
            leaves = self.program.leaves[name]
            variables = axis.variables(self.sequence[name][group], index)
            found = evaluate(leaves, plain(*leaves), variables, self.tables)
            values |= dict(zip(leaves, found, strict=True))
        return self._evaluate(values, None, (len(q), len(k), len(group)))

    def extent(self, boxes: Boxes, name: str) -> tuple[np.ndarray, np.ndarray]:
        """First index and end of each box on an axis."""
        block = boxes.i if name == "q" else boxes.j
        return self.axes[name].extent(boxes.level, self.sequence[name][boxes.group], block)

    def filled(self, boxes: Boxes) -> np.ndarray:
        """Which boxes, parts of tiles, have any element."""
        result = np.ones(len(boxes), bool)
        for name, axis in self.axes.items():
            block = boxes.i if name == "q" else boxes.j
            at = axis.offsets[boxes.level][self.sequence[name][boxes.group]] + block
            result &= axis.filled[boxes.level][at]
        return result

    def _evaluate(
        self,
        values: Mapping[Node, Range],
        differ: Mapping[Node, np.ndarray] | None,
        shape: tuple[int, ...],
    ) -> Range:
        (r,) = evaluate(self.program.roots, self.program.steps, values, self.tables, differ)
        return Range(np.broadcast_to(r.lo, shape), np.broadcast_to(r.hi, shape))

    def counts(self, level: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks of queries and of keys at a level, for each group."""
        counts = []
        for tiles in self.groups.tiles(self.tile["q"], self.tile["k"]):
            counts.append(-(-tiles * FACTOR**TILE // FACTOR**level))
        return counts[0], counts[1]

    def children(self, boxes: Boxes) -> Boxes:
        """The boxes of the next finer level, those past the last tile left out."""
        level = boxes.level - 1
        count_q, count_k = self.counts(level)
        offset = np.arange(FACTOR)
        shape = (len(boxes), FACTOR, FACTOR)
        i = np.broadcast_to((boxes.i[:, None] * FACTOR + offset)[:, :, None], shape).reshape(-1)
        j = np.broadcast_to((boxes.j[:, None] * FACTOR + offset)[:, None, :], shape).reshape(-1)
        group = np.repeat(boxes.group, FACTOR * FACTOR)
        inside = (i < count_q[group]) & (j < count_k[group])
        return Boxes(level, group[inside], i[inside], j[inside])


def _pick(r: Range, group: np.ndarray) -> Range:
    return Range(r.lo[group]) if r.exact else Range(r.lo[group], r.hi[group])


def _pairs(tiles_q: np.ndarray, tiles_k: np.ndarray, level: int) -> int:
    factor = FACTOR ** (level - TILE)
    return int((-(-tiles_q // factor) * -(-tiles_k // factor)).sum())


def group_values(program: Program, groups: Groups, tables: Tables) -> dict[Node, Range]:
    """The leaves that depend on neither index, for every group."""
    leaves = program.leaves[""]
    variables = {A.var(name): Range(column) for name, column in groups.columns.items()}
    found = evaluate(leaves, plain(*leaves), variables, tables)
    shape = (len(groups),)
    return {
        leaf: Range(np.broadcast_to(r.lo, shape), None if r.exact else np.broadcast_to(r.hi, shape))
        for leaf, r in zip(leaves, found, strict=True)
    }


def coarsest(analysis: Analysis) -> Boxes:
    """Every box of the coarsest level."""
    count_q, count_k = analysis.counts(analysis.top)
    pairs = count_q * count_k
    group = np.repeat(np.arange(len(pairs)), pairs)
    local = np.arange(int(pairs.sum())) - np.repeat(np.cumsum(pairs) - pairs, pairs)
    width = count_k[group]
    return Boxes(analysis.top, group, local // width, local % width)


def joined(parts: list[Boxes]) -> Boxes:
    """Boxes of one level, concatenated; at least one part."""
    return Boxes(
        parts[0].level,
        *(np.concatenate([getattr(p, name) for p in parts]) for name in ("group", "i", "j")),
    )
