"""The tile map: which (query tile, key tile) pairs a mask leaves empty, partial or full.

`tile_map` analyses a mask; a `TileMap` holds the result as runs of key tiles per query tile, which
is what every consumer (reference, kernels, `explain`, cost model) walks. Storage is proportional to
runs; heads and sequences with the same map share it.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from fa4core.lowering.bounds import Program, axes_of, split
from fa4core.lowering.tables import Tables
from fa4core.plan.boxes import VARIABLES, Analysis, Groups, group_values
from fa4core.plan.classify import Rectangles, classify
from fa4core.plan.kinds import EMPTY, FULL, PARTIAL
from fa4core.plan.resolve import Budget
from fa4core.plan.runs import Runs, merge, side_by_side, transpose
from primitives.expr import Node

__all__ = ["EMPTY", "FULL", "PARTIAL", "TileMap", "tile_map"]

#: Elements that may be evaluated to decide tiles which bounds leave open: three seconds at worst,
#: rarely reached, because masks without structure are given up on early.
EXACT_BUDGET = 1 << 25

_PAIRS_AT_ONCE = 1 << 22  # tile pairs of the groups that are analysed together


@attrs.frozen(eq=False)
class TileMap:
    """For every batch entry, head and query tile: the key tiles to visit and the kind of each.

    Attributes:
        batch, heads: The extents of `b` and `h`.
        tile_q, tile_k: Elements of a query tile and of a key tile.
        seqlens_q, seqlens_k: Lengths of every batch entry; its last tiles are clipped to them.

    A key tile is EMPTY if the mask is false on all of its elements inside the sequences, FULL if it
    is true on all of them. PARTIAL says nothing. In a transposed map (`transpose`) queries and keys
    have changed places, in the attributes too.
    """

    batch: int
    heads: int
    tile_q: int
    tile_k: int
    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    _group: np.ndarray  # (batch, heads): which of the stored maps
    _first_row: np.ndarray  # (groups + 1,): where the rows of each stored map begin
    _runs: Runs

    def tiles_q(self, b: int) -> int:
        """Query tiles of a batch entry."""
        return -(-self.seqlens_q[b] // self.tile_q)

    def tiles_k(self, b: int) -> int:
        """Key tiles of a batch entry."""
        return -(-self.seqlens_k[b] // self.tile_k)

    def runs(self, b: int, h: int, i: int) -> list[tuple[int, int, int]]:
        """Query tile `i`'s runs (first key tile, end, kind), ascending, EMPTY left out."""
        here = self._slice(b, h, i)
        r = self._runs
        return list(
            zip(r.start[here].tolist(), r.end[here].tolist(), r.kind[here].tolist(), strict=True)
        )

    def row(self, b: int, h: int, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Query tile `i`'s key tiles (int32), ascending, and their kinds (int8)."""
        here = self._slice(b, h, i)
        start, end = self._runs.start[here], self._runs.end[here]
        count = end - start
        tiles = np.repeat(end - np.cumsum(count), count) + np.arange(int(count.sum()))
        return tiles.astype(np.int32), np.repeat(self._runs.kind[here], count)

    def dense(self, b: int, h: int) -> np.ndarray:
        """The kinds as an int8 array (query tiles, key tiles)."""
        first = int(self._first_row[self._group[b, h]])
        rows, columns = self.tiles_q(b), self.tiles_k(b)
        kinds = np.zeros((rows, columns + 1), np.int8)
        pointer = self._runs.pointer[first : first + rows + 1]
        if rows:
            here = slice(pointer[0], pointer[-1])
            row = np.repeat(np.arange(rows), np.diff(pointer))
            start, end, kind = (getattr(self._runs, n)[here] for n in ("start", "end", "kind"))
            np.add.at(kinds, (row, start), kind)
            np.subtract.at(kinds, (row, end), kind)
        return np.cumsum(kinds, axis=1, dtype=np.int8)[:, :columns]

    @property
    def stored_map(self) -> np.ndarray:
        """(batch, heads): number of the map that a sequence and head use; equal ones share one."""
        return self._group

    def counts(self) -> dict[int, int]:
        """How many (query tile, key tile) pairs are of each kind, over all batch and heads."""
        uses = np.bincount(self._group.reshape(-1), minlength=len(self._first_row) - 1)
        weight = np.repeat(uses, np.diff(self._runs.pointer[self._first_row]))
        size = (self._runs.end - self._runs.start) * weight
        partial = int(size[self._runs.kind == PARTIAL].sum())
        full = int(size[self._runs.kind == FULL].sum())
        pairs = sum(self.tiles_q(b) * self.tiles_k(b) for b in range(self.batch)) * self.heads
        return {EMPTY: pairs - partial - full, PARTIAL: partial, FULL: full}

    def lengths(self, kind: int | None = None) -> np.ndarray:
        """Key tiles to visit, int64, one entry for each work tile in the order b, h, query tile.

        One-dimensional, because batch entries may differ in length. Work tiles with nothing to
        visit count 0; they still exist.

        Args:
            kind: PARTIAL or FULL, to count those only; None counts both.
        """
        r = self._runs
        size = (r.end - r.start).astype(np.int64)
        if kind is not None:
            size = np.where(r.kind == kind, size, 0)
        total = np.concatenate([[0], np.cumsum(size)])
        per_row = np.diff(total[r.pointer])
        first = self._first_row
        parts = [per_row[first[g] : first[g + 1]] for g in self._group.reshape(-1)]
        return np.concatenate([np.zeros(0, np.int64), *parts])

    def full_ranges(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """First and last query and key, "q" and "k", of every run of FULL tiles."""
        runs, maps = self._runs, len(self._first_row) - 1
        lengths = np.zeros((2, maps), np.int64)
        lengths[0, self._group] = np.asarray(self.seqlens_q, np.int64)[:, None]
        lengths[1, self._group] = np.asarray(self.seqlens_k, np.int64)[:, None]
        full = runs.kind == FULL
        row = np.repeat(np.arange(len(runs.pointer) - 1), np.diff(runs.pointer))[full]
        group = np.searchsorted(self._first_row, row, side="right") - 1
        q = (row - self._first_row[group]) * self.tile_q
        k, end = (x[full].astype(np.int64) * self.tile_k for x in (runs.start, runs.end))
        last_q = np.minimum(q + self.tile_q, lengths[0, group]) - 1
        return {"q": (q, last_q), "k": (k, np.minimum(end, lengths[1, group]) - 1)}

    def side_by_side(self, side: int, cut_rows: bool = False) -> tuple[np.ndarray, Runs]:
        """Key tiles that `side` query tiles next to each other visit together.

        A key tile that only some of them need is PARTIAL for the others: their mask is false there.
        The last key tile is never FULL where the sequence ends inside it. Query tiles behind the
        last one, which only fill up a group, are FULL elsewhere: no mask is evaluated for them.

        Args:
            side: Query tiles of a group.
            cut_rows: Whether a last query tile that the sequence ends inside is never FULL, either,
                nor query tiles behind it.

        Returns:
            The first row of every batch entry and head, (batch, heads), and the runs of all rows,
            one for each group of query tiles; bits `2 t` and `2 t + 1` are the kind of the group's
            query tile `t`. Heads and batch entries with the same map share rows.
        """
        maps = len(self._first_row) - 1
        columns, ragged = np.zeros(maps, np.int64), np.zeros(maps, bool)
        lengths = np.asarray(self.seqlens_k, np.int64)
        columns[self._group] = -(-lengths // self.tile_k)[:, None]
        ragged[self._group] = (lengths % self.tile_k != 0)[:, None]
        cut = np.zeros(maps, bool) if cut_rows else None
        if cut is not None:
            cut[self._group] = (np.asarray(self.seqlens_q) % self.tile_q != 0)[:, None]
        first, runs = side_by_side(self._runs, self._first_row, columns, ragged, cut, side)
        return first[self._group], runs

    def transpose(self) -> TileMap:
        """The same map seen from the keys: for every key tile, the query tiles to visit.

        The result's rows are key tiles: `result.runs(b, h, j)` lists runs of query tiles, and
        `result.tile_q` is this map's `tile_k`, and so on.
        """
        columns = np.zeros(len(self._first_row) - 1, np.int64)
        for b in range(self.batch):
            columns[self._group[b]] = self.tiles_k(b)
        first = np.concatenate([[0], np.cumsum(columns)])
        return attrs.evolve(
            self,
            tile_q=self.tile_k,
            tile_k=self.tile_q,
            seqlens_q=self.seqlens_k,
            seqlens_k=self.seqlens_q,
            first_row=first,
            runs=transpose(self._runs, self._first_row, first),
        )

    def __repr__(self) -> str:
        n = self.counts()
        return (
            f"TileMap(batch={self.batch}, heads={self.heads}, tile={self.tile_q}x{self.tile_k}, "
            f"empty={n[EMPTY]}, partial={n[PARTIAL]}, full={n[FULL]})"
        )

    def _slice(self, b: int, h: int, i: int) -> slice:
        if not (0 <= b < self.batch and 0 <= h < self.heads and 0 <= i < self.tiles_q(b)):
            tiles = self.tiles_q(b) if 0 <= b < self.batch else 0
            raise IndexError(
                f"batch entry {b}, head {h}, query tile {i} of a tile map with {self.batch} batch "
                f"entries, {self.heads} heads and {tiles} query tiles"
            )
        row = int(self._first_row[self._group[b, h]]) + i
        return slice(int(self._runs.pointer[row]), int(self._runs.pointer[row + 1]))


def tile_map(
    mask: Node,
    *,
    batch: int,
    heads: int,
    seqlens_q: Sequence[int],
    seqlens_k: Sequence[int],
    tile_q: int = 128,
    tile_k: int = 128,
    exact_budget: int = EXACT_BUDGET,
) -> TileMap:
    """Classify every tile of a problem.

    Args:
        mask: A bool expression over b, h, q, k, seqlen_q, seqlen_k and captured tensors.
        batch: Extent of `b`.
        heads: Extent of `h`.
        seqlens_q: Queries of each batch entry; may be 0.
        seqlens_k: Keys of each batch entry; may be 0.
        tile_q: Queries in a tile.
        tile_k: Keys in a tile.
        exact_budget: Elements that may be evaluated to decide tiles which interval analysis leaves
            open; when it is used up the rest stays PARTIAL.

    Raises:
        TypeError: If the mask is not a bool expression.
        ValueError: If sizes are negative or do not fit together, or the mask uses the score.
    """
    _check(mask, batch, heads, (tuple(seqlens_q), tuple(seqlens_k)), (tile_q, tile_k))
    program = split(mask)
    tables = Tables()
    seen = heads if "h" in mask.free else min(heads, 1)  # one head stands for all
    every, group = _distinct(program, batch, seen, seqlens_q, seqlens_k, tables)
    group = np.repeat(group.reshape(batch, seen), heads // max(seen, 1), axis=1)
    tiles_q, _ = every.tiles(tile_q, tile_k)
    first_row = np.concatenate([[0], np.cumsum(tiles_q)])
    found: list[Rectangles] = []
    budget = Budget(0)
    portions = _portions(every, tile_q, tile_k)
    for chosen in portions:
        budget.left += exact_budget // len(portions)  # what one leaves, the next may use
        part = classify(Analysis(program, every.select(chosen), tile_q, tile_k, tables), budget)
        found.append(attrs.evolve(part, group=part.group + chosen.start))
    joined = Rectangles(
        *(np.concatenate([getattr(r, f.name) for r in found]) for f in attrs.fields(Rectangles))
    )
    return TileMap(
        batch=batch,
        heads=heads,
        tile_q=tile_q,
        tile_k=tile_k,
        seqlens_q=tuple(int(n) for n in seqlens_q),
        seqlens_k=tuple(int(n) for n in seqlens_k),
        group=group,
        first_row=first_row,
        runs=merge(joined, first_row),
    )


def _check(
    mask: Node,
    batch: int,
    heads: int,
    seqlens: tuple[tuple[int, ...], tuple[int, ...]],
    tiles: tuple[int, int],
) -> None:
    if not isinstance(mask, Node) or mask.kind != "bool":
        given = f"an expression of kind {mask.kind}" if isinstance(mask, Node) else type(mask)
        raise TypeError(f"a mask is a bool expression (primitives.expr.Node), got {given}")
    if "score" in mask.free:
        raise ValueError("the mask depends on the score; a mask may use b, h, q, k and lengths")
    for name, lengths in zip(("seqlens_q", "seqlens_k"), seqlens, strict=True):
        if len(lengths) != batch or any(n < 0 for n in lengths):
            raise ValueError(
                f"{name} needs {batch} lengths of at least 0, one a batch entry; got {lengths}"
            )
    if batch < 0 or heads < 0 or min(tiles) < 1:
        raise ValueError(
            f"batch and heads must be at least 0 and tiles at least 1; got batch={batch}, "
            f"heads={heads}, tile_q={tiles[0]}, tile_k={tiles[1]}"
        )


def _distinct(
    program: Program,
    batch: int,
    heads: int,
    seqlens_q: Sequence[int],
    seqlens_k: Sequence[int],
    tables: Tables,
) -> tuple[Groups, np.ndarray]:
    """Groups with maps of their own, and which of them each (b, h) uses.

    Two heads share a group if everything the mask derives from b, h and the lengths is the same.
    """
    columns = {
        "b": np.repeat(np.arange(batch), heads),
        "h": np.tile(np.arange(heads), batch),
        "seqlen_q": np.repeat(np.asarray(seqlens_q, np.int64), heads),
        "seqlen_k": np.repeat(np.asarray(seqlens_k, np.int64), heads),
    }
    every = Groups({name: columns[name].astype(np.int64) for name in VARIABLES})
    sides = [s for pair in program.equalities.values() for s in pair]
    used = set().union(
        *(n.free for n in [*program.leaves["q"], *program.leaves["k"], *sides] if axes_of(n))
    )
    keys = [every.columns[n] for n in VARIABLES if n in used or n.startswith("seqlen")]
    for r in group_values(program, every, tables).values():
        for bound in (r.lo,) if r.exact else (r.lo, r.hi):
            wide = bound.astype(np.float64 if bound.dtype.kind == "f" else np.int64)
            keys.append(wide.view(np.int64))
    _, first, group = np.unique(np.stack(keys), axis=1, return_index=True, return_inverse=True)
    return every.select(first), group.reshape(-1)


def _portions(groups: Groups, tile_q: int, tile_k: int) -> list[slice]:
    """Consecutive groups to analyse together: a bounded number of tile pairs."""
    tiles_q, tiles_k = groups.tiles(tile_q, tile_k)
    portions, begin, pairs = [], 0, 0
    for g, size in enumerate((tiles_q * tiles_k).tolist()):
        if g > begin and pairs + size > _PAIRS_AT_ONCE:
            portions.append(slice(begin, g))
            begin, pairs = g, 0
        pairs += size
    return [*portions, slice(begin, len(groups))]
