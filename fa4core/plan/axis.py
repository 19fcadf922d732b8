"""Leaves of a mask program over one index axis, reduced to minima and maxima of nested blocks.

An `Axis` covers the queries, or the keys, of one or more sequences. Level `TILE` is tiles, and
each level above joins 4 blocks. Level 1 cuts every tile in 4 parts where the leaves jump (a new
document, a new row of a picture), so that they are smooth inside parts; level 0 cuts each part
evenly in 4. The leaves are evaluated once at every index, a chunk at a time, and only the blocks'
bounds are kept. Used by the tile classification; knows nothing of masks beyond their leaves.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from fa4core.lowering.bounds import evaluate, plain
from fa4core.lowering.ranges import Range
from fa4core.lowering.tables import Tables
from primitives.expr import Node
from primitives.expr import algebra as A

FACTOR = 4
TILE = 2  # the level of tiles
PARTS = FACTOR**TILE

_CHUNK = 1 << 15  # indices evaluated at once: arrays that fit a core's cache
_EVEN = 0.03  # jumps below this share of a leaf's range in the tile do not attract a cut


@attrs.define(eq=False)
class Axis:
    """One axis ("q" or "k") of sequences of given lengths.

    `columns[name]` is, for each sequence, the value of b, h, seqlen_q or seqlen_k that the leaves
    may use. `counts[level]` and `offsets[level]` say how many blocks each sequence has and where
    they begin in the tables `low`, `high` and `present` (sets of values, as 64-bit signatures).
    `starts` are the first indices of the blocks of level 0. `filled[level]`, for the levels
    below tiles, says which blocks have any index.
    """

    name: str
    tile: int
    lengths: np.ndarray
    columns: Mapping[str, np.ndarray]
    top: int
    counts: list[np.ndarray] = attrs.field(init=False)
    offsets: list[np.ndarray] = attrs.field(init=False)
    starts: np.ndarray = attrs.field(init=False)
    filled: list[np.ndarray] = attrs.field(init=False)
    low: dict[Node, list[np.ndarray]] = attrs.field(init=False, factory=dict)
    high: dict[Node, list[np.ndarray]] = attrs.field(init=False, factory=dict)
    present: dict[Node, list[np.ndarray]] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        tiles = -(-self.lengths // self.tile)
        self.counts = [-(-tiles * PARTS // FACTOR**level) for level in range(self.top + 1)]
        self.offsets = [np.cumsum(c) - c for c in self.counts]
        self.starts = np.zeros(int(self.counts[0].sum()), np.int64)

    def extent(
        self, level: int, sequence: np.ndarray, block: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """First index and end of blocks, clipped to the sequence."""
        length = self.lengths[sequence]
        if level >= TILE:
            size = self.tile * FACTOR ** (level - TILE)
            return np.minimum(block * size, length), np.minimum((block + 1) * size, length)
        first, after = block * FACTOR**level, (block + 1) * FACTOR**level
        offset = self.offsets[0][sequence]
        inner = self.starts[offset + np.minimum(after, self.counts[0][sequence] - 1)]
        last = after % PARTS == 0  # the tile's last part ends with the tile
        end = np.where(last, np.minimum(after // PARTS * self.tile, length), inner)
        return self.starts[offset + first], end

    def reduce(self, leaves: Sequence[Node], sets: Sequence[Node], tables: Tables) -> None:
        """Fill the tables for `leaves` (bounds) and `sets` (which values occur)."""
        blocks = len(self.starts)
        for leaf in leaves:
            low, high = _NOTHING[leaf.kind]
            self.low[leaf], self.high[leaf] = [np.full(blocks, low)], [np.full(blocks, high)]
        for leaf in sets:
            self.present[leaf] = [np.zeros(blocks, np.uint64)]
        self._reduce_points(tuple(dict.fromkeys((*leaves, *sets))), tables)
        self.filled = [self._filled(level) for level in range(TILE)]
        for level in range(1, self.top + 1):
            starts = _ragged(self.counts[level]) * FACTOR
            starts += np.repeat(self.offsets[level - 1], self.counts[level])
            for table, operation in (
                (self.low, np.minimum),
                (self.high, np.maximum),
                (self.present, np.bitwise_or),
            ):
                for levels in table.values():
                    finer = levels[-1]
                    levels.append(operation.reduceat(finer, starts) if len(starts) else finer)

    def _reduce_points(self, roots: tuple[Node, ...], tables: Tables) -> None:
        """Evaluate at every index, choose the parts of each tile, and reduce to level 0."""
        steps = plain(*roots)
        tiles = self.counts[TILE]
        sequence = np.repeat(np.arange(len(tiles)), tiles)
        start = _ragged(tiles) * self.tile
        size = np.minimum(self.lengths[sequence] - start, self.tile)
        flat = np.cumsum(size) - size
        every = np.arange(0, int(size.sum()), max(_CHUNK, self.tile))
        cuts = np.unique(np.append(np.searchsorted(flat, every), len(flat)))
        for a, z in itertools.pairwise(cuts):
            here = slice(a, z)
            tile = np.repeat(np.arange(z - a), size[here])
            index = np.arange(len(tile)) - (flat[here] - flat[a])[tile]
            which = sequence[here][tile] if len(self.lengths) > 1 else np.zeros(1, np.int64)
            variables = self.variables(which, index + start[here][tile])
            found = dict(zip(roots, evaluate(roots, steps, variables, tables), strict=True))
            with np.errstate(all="ignore"):  # infinities: their jumps are NaN, which no cut follows
                jumps = _jumps(found, flat[here] - flat[a], tile)
            parts = _parts(jumps, size[here], tile, index, self.tile)
            blocks = slice(a * PARTS, z * PARTS)
            self.starts[blocks] = (start[here, None] + parts).reshape(-1)
            self._fill(found, (flat[here, None] - flat[a] + parts).reshape(-1), blocks, len(tile))

    def _fill(
        self, found: Mapping[Node, Range], starts: np.ndarray, blocks: slice, size: int
    ) -> None:
        filled = np.flatnonzero(np.diff(starts, append=size) > 0)  # parts may be empty
        edges, at = starts[filled], blocks.start + filled
        for leaf, r in found.items():
            lo = np.broadcast_to(r.lo, size)
            hi = lo if r.exact else np.broadcast_to(r.hi, size)
            if leaf in self.low and r.exact and _straight(leaf):
                first, last = lo[edges], lo[np.append(edges[1:], size) - 1]
                self.low[leaf][0][at] = np.minimum(first, last)
                self.high[leaf][0][at] = np.maximum(first, last)
            elif leaf in self.low:
                self.low[leaf][0][at] = np.minimum.reduceat(lo, edges)
                self.high[leaf][0][at] = np.maximum.reduceat(hi, edges)
            if leaf in self.present:
                self.present[leaf][0][at] = np.bitwise_or.reduceat(signature(lo, hi), edges)

    def _filled(self, level: int) -> np.ndarray:
        count = self.counts[level]
        first, end = self.extent(level, np.repeat(np.arange(len(count)), count), _ragged(count))
        return end > first

    def variables(self, sequence: np.ndarray, index: np.ndarray) -> dict[Node, Range]:
        """The variables a leaf may use, at `index` of `sequence` (shapes broadcast)."""
        values = {A.var(name): Range(column[sequence]) for name, column in self.columns.items()}
        return values | {A.var(self.name): Range(index)}

    def ranges(self, level: int, sequence: np.ndarray, block: np.ndarray) -> dict[Node, Range]:
        """The leaves' ranges over blocks."""
        at = self.offsets[level][sequence] + block
        return {n: Range(self.low[n][level][at], self.high[n][level][at]) for n in self.low}

    def signatures(
        self, level: int, sequence: np.ndarray, block: np.ndarray
    ) -> dict[Node, np.ndarray]:
        """Which values of the leaves in `present` occur in blocks."""
        at = self.offsets[level][sequence] + block
        return {n: levels[level][at] for n, levels in self.present.items()}


#: What a block without any index contributes to a minimum and to a maximum.
_NOTHING = {
    "bool": (np.True_, np.False_),
    "int": (np.iinfo(np.int64).max, np.iinfo(np.int64).min),
    "float": (np.inf, -np.inf),
}


def _ragged(counts: np.ndarray) -> np.ndarray:
    """0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, ..."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def _straight(leaf: Node) -> bool:
    """Whether a leaf is a straight line in its index: its extremes are at the ends."""
    return leaf.op == "var" or (leaf.op == "linear" and all(a.op == "var" for a in leaf.args))


def _jumps(found: Mapping[Node, Range], starts: np.ndarray, tile: np.ndarray) -> np.ndarray | None:
    """How far any leaf jumps from the index before, as a share of its range in the tile."""
    result: np.ndarray | None = None
    for leaf, r in found.items():
        if _straight(leaf) or np.ndim(r.lo) == 0 or not r.exact:
            continue
        value = r.lo.astype(np.float32)
        # where a leaf does not change in any tile there is nothing to cut at
        span = np.maximum.reduceat(value, starts) - np.minimum.reduceat(value, starts)
        if not np.any(span > 0):
            continue
        scale = (1 / np.maximum(span, np.float32(1e-30)))[tile]
        jump = np.abs(np.diff(value, prepend=value[:1])) * scale
        result = jump if result is None else np.maximum(result, jump)
    return result


def _parts(
    jumps: np.ndarray | None, size: np.ndarray, tile: np.ndarray, index: np.ndarray, width: int
) -> np.ndarray:
    """Where the 16 parts of each tile start, relative to the tile: (tiles, 16), ascending."""
    cut = size[:, None] * np.arange(1, FACTOR) // FACTOR
    if jumps is not None:
        uneven = np.zeros(len(size), bool)
        large = np.flatnonzero((jumps > _EVEN) & (index > 0))
        uneven[tile[large]] = True
        rows = np.flatnonzero(uneven)
        score = np.zeros((len(rows), max(width, FACTOR)), np.float32)
        score[np.arange(len(rows))[:, None], cut[rows]] = _EVEN
        score[np.searchsorted(rows, tile[large]), index[large]] = jumps[large]
        score[:, 0] = 0
        best = np.argpartition(score, -(FACTOR - 1), axis=1)[:, -(FACTOR - 1) :]
        chosen = np.take_along_axis(score, best, axis=1) > 0
        cut[rows] = np.sort(np.where(chosen, best, size[rows, None]), axis=1)
    edges = np.concatenate([np.zeros((len(size), 1), np.int64), cut, size[:, None]], axis=1)
    step = np.diff(edges)[:, :, None] * np.arange(FACTOR) // FACTOR
    return (edges[:, :-1, None] + step).reshape(len(size), PARTS)


def signature(lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """One bit of 64 for an integer, by a multiplicative hash; all bits where it is unknown."""
    scrambled = lo.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = np.uint64(1) << (scrambled >> np.uint64(58))
    return bits if hi is lo else np.where(lo == hi, bits, ~np.uint64(0))
