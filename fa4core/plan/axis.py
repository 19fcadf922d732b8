"""Leaves of a mask program over one index axis, reduced to minima and maxima of nested blocks.

An `Axis` covers the queries, or the keys, of one or more sequences. Level 0 splits every tile into
16 parts, level 1 into 4, level `TILE` is tiles, and each level above joins 4 blocks. The leaves are
evaluated once at every index, a chunk at a time, and only the blocks' bounds are kept. Used by the
tile classification; knows nothing of masks beyond their leaves.
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


def block_start(index: np.ndarray, level: int, tile: int) -> np.ndarray:
    """The first index of a block; parts of a tile differ by at most one in size."""
    if level >= TILE:
        return index * (tile * FACTOR ** (level - TILE))
    shift = 2 * (TILE - level)  # FACTOR^(TILE - level) parts are 2^shift
    return (index >> shift) * tile + ((index & ((1 << shift) - 1)) * tile >> shift)


@attrs.define(eq=False)
class Axis:
    """One axis ("q" or "k") of sequences of given lengths.

    `columns[name]` is, for each sequence, the value of b, h, seqlen_q or seqlen_k that the leaves
    may use. `counts[level]` and `offsets[level]` say how many blocks each sequence has and where
    they begin in the tables `low`, `high` and `present` (sets of values, as 64-bit signatures).
    """

    name: str
    tile: int
    lengths: np.ndarray
    columns: Mapping[str, np.ndarray]
    top: int
    counts: list[np.ndarray] = attrs.field(init=False)
    offsets: list[np.ndarray] = attrs.field(init=False)
    low: dict[Node, list[np.ndarray]] = attrs.field(init=False, factory=dict)
    high: dict[Node, list[np.ndarray]] = attrs.field(init=False, factory=dict)
    present: dict[Node, list[np.ndarray]] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        tiles = -(-self.lengths // self.tile)
        finest = tiles * PARTS
        self.counts = [-(-finest // FACTOR**level) for level in range(self.top + 1)]
        self.offsets = [np.cumsum(c) - c for c in self.counts]

    def reduce(self, leaves: Sequence[Node], sets: Sequence[Node], tables: Tables) -> None:
        """Fill the tables for `leaves` (bounds) and `sets` (which values occur)."""
        for leaf in leaves:
            low, high = _NOTHING[leaf.kind]
            self.low[leaf] = [np.full(int(self.counts[0].sum()), low)]
            self.high[leaf] = [np.full(int(self.counts[0].sum()), high)]
        for leaf in sets:
            self.present[leaf] = [np.zeros(int(self.counts[0].sum()), np.uint64)]
        self._reduce_points(leaves, sets, tables)
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

    def _reduce_points(self, leaves: Sequence[Node], sets: Sequence[Node], tables: Tables) -> None:
        roots = tuple(dict.fromkeys((*leaves, *sets)))
        steps = plain(*roots)
        base = np.cumsum(self.lengths) - self.lengths
        total = int(self.lengths.sum())
        block = _ragged(self.counts[0])
        length = np.repeat(self.lengths, self.counts[0])
        start = np.minimum(block_start(block, 0, self.tile), length)
        start += np.repeat(base, self.counts[0])
        filled = np.flatnonzero(np.diff(start, append=total) > 0)  # parts of small tiles are empty
        start = start[filled]
        cuts = np.unique(np.append(np.searchsorted(start, np.arange(0, total, _CHUNK)), len(start)))
        for a, z in itertools.pairwise(cuts):
            first, last = int(start[a]), int(start[z]) if z < len(start) else total
            values = self._variables(np.arange(first, last), base)
            found = evaluate(roots, steps, values, tables)
            edges, where, size = start[a:z] - first, filled[a:z], last - first
            for leaf, r in zip(roots, found, strict=True):
                lo = np.broadcast_to(r.lo, size)
                hi = lo if r.exact else np.broadcast_to(r.hi, size)
                if leaf in self.low:
                    self.low[leaf][0][where] = np.minimum.reduceat(lo, edges)
                    self.high[leaf][0][where] = np.maximum.reduceat(hi, edges)
                if leaf in self.present:
                    self.present[leaf][0][where] = np.bitwise_or.reduceat(signature(lo, hi), edges)

    def _variables(self, flat: np.ndarray, base: np.ndarray) -> dict[Node, Range]:
        if len(self.lengths) == 1:
            return self.variables(np.zeros(1, np.int64), flat)
        sequence = np.searchsorted(base, flat, side="right") - 1
        return self.variables(sequence, flat - base[sequence])

    def variables(self, sequence: np.ndarray, index: np.ndarray) -> dict[Node, Range]:
        """The variables a leaf may use, at `index` of `sequence` (shapes broadcast)."""
        values = {A.var(name): Range(column[sequence]) for name, column in self.columns.items()}
        return values | {A.var(self.name): Range(index)}

    def ranges(self, level: int, sequence: np.ndarray, block: np.ndarray) -> dict[Node, Range]:
        """The leaves' ranges over blocks."""
        at = self.offsets[level][sequence] + block
        return {
            leaf: Range(self.low[leaf][level][at], self.high[leaf][level][at]) for leaf in self.low
        }


#: What a block without any index contributes to a minimum and to a maximum.
_NOTHING = {
    "bool": (np.True_, np.False_),
    "int": (np.iinfo(np.int64).max, np.iinfo(np.int64).min),
    "float": (np.inf, -np.inf),
}


def _ragged(counts: np.ndarray) -> np.ndarray:
    """0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, ..."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def signature(lo: np.ndarray, hi: np.ndarray) -> np.ndarray:
    """One bit of 64 for an integer, by a multiplicative hash; all bits where it is unknown."""
    scrambled = lo.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = np.uint64(1) << (scrambled >> np.uint64(58))
    return bits if hi is lo else np.where(lo == hi, bits, ~np.uint64(0))
