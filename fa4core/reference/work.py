"""Work tiles of the reference, and the scores of a block of one.

A work tile is a tile of rows together with the blocks of columns it visits, for all pairs of
(sequence, head) that visit the same ones: they are computed in one batched product. Rows are
queries in the forward pass and keys in the backward pass. Which tiles exist, and which need the
mask, is what the tile map says; nothing here decides a bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import attrs
import numpy as np
import torch

from fa4core.lowering.torch import evaluate
from fa4core.plan.problem import Problem
from fa4core.program import Program
from fa4core.reference.softmax import LOG2E, NEVER
from primitives.expr import Node, algebra

Tensor = torch.Tensor
PARTIAL = 1

#: Scores computed at a time. Small enough to stay in a CPU's cache, large enough that torch's
#: overhead for each operation does not show: 2^19 and 2^20 are the flat minimum of `python
#: benchmarks/reference.py chunks` on a Xeon core.
MAX_SCORES = 1 << 20


class TileRows(Protocol):
    """What the reference needs of a tile map (`fa4core.plan.tiles.TileMap`)."""

    def row(self, b: int, h: int, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Column tiles that row tile `i` visits, ascending, and the kind of each."""
        ...

    def transpose(self) -> TileRows: ...


@attrs.frozen(eq=False)
class Block:
    """Columns visited together.

    Attributes:
        columns: (w,) column indices.
        masked: Whether the mask must be evaluated (PARTIAL tiles); else all are attended to.
    """

    columns: Tensor
    masked: bool


@attrs.frozen(eq=False)
class Work:
    """A tile of rows for all pairs that visit the same column tiles.

    Attributes:
        b: (n,) sequence of each pair.
        h: (n,) query head of each pair.
        rows: (t,) row indices.
        tiles: Column tiles visited, in order.
        kinds: Kind of each.
        tile: Columns in a tile.
        seqlen_q: Query length of these sequences.
        seqlen_k: Key length.
        columns: Number of columns, one of the two.
    """

    b: Tensor
    h: Tensor
    rows: Tensor
    tiles: np.ndarray
    kinds: np.ndarray
    tile: int
    seqlen_q: int
    seqlen_k: int
    columns: int

    def shares(self, count: int) -> list[list[Block]]:
        """The column tiles dealt out to `count` workers in contiguous shares, none of them empty.

        Within a share, tiles of one kind are merged into wide blocks: a block is one step of the
        online softmax, whose result does not depend on how wide a step is, except in rounding.
        """
        parts = np.array_split(np.arange(len(self.tiles)), count)
        return [self._blocks(p) for p in parts if len(p)]

    def _blocks(self, part: np.ndarray) -> list[Block]:
        most = max(1, MAX_SCORES // (len(self.b) * len(self.rows) * self.tile))
        tiles, kinds = self.tiles[part], self.kinds[part]
        blocks = []
        for masked in (False, True):
            chosen = tiles[(kinds == PARTIAL) == masked].astype(np.int64)
            for start in range(0, len(chosen), most):
                first = chosen[start : start + most, None] * self.tile
                columns = (first + np.arange(self.tile)).reshape(-1)
                columns = torch.from_numpy(columns[columns < self.columns])
                blocks.append(Block(columns.to(self.b.device), masked))
        return blocks


def work(
    tiles: TileRows,
    mask: Node,
    problem: Problem,
    tile_rows: int,
    tile_columns: int,
    device: torch.device,
    *,
    rows_are_keys: bool = False,
) -> Iterator[Work]:
    """All work tiles that visit anything, rows in order.

    Args:
        tiles: The tile map; transposed if `rows_are_keys`.
        mask: What it is the map of; heads and sequences share rows where it doesn't use them.
    """
    for (seqlen_q, seqlen_k), sequences in _by_lengths(problem).items():
        rows, columns = (seqlen_k, seqlen_q) if rows_are_keys else (seqlen_q, seqlen_k)
        most = max(1, MAX_SCORES // (min(tile_rows, max(rows, 1)) * tile_columns))
        for i in range(-(-rows // tile_rows) if columns else 0):
            index = torch.arange(i * tile_rows, min((i + 1) * tile_rows, rows), device=device)
            for pairs, visited, kinds in _sharing(tiles, mask, sequences, problem.heads_q, i):
                for start in range(0, len(pairs), most):
                    b, h = torch.tensor(pairs[start : start + most], device=device).unbind(1)
                    yield Work(
                        b, h, index, visited, kinds, tile_columns, seqlen_q, seqlen_k, columns
                    )


def all_queries(problem: Problem, device: torch.device) -> Iterator[Work]:
    """Every query of every head, in work tiles without columns, one for each pair of lengths."""
    none = np.empty(0, np.int64)
    for (seqlen_q, seqlen_k), sequences in _by_lengths(problem).items():
        pairs = [(b, h) for b in sequences for h in range(problem.heads_q)]
        b, h = torch.tensor(pairs, device=device).unbind(1)
        rows = torch.arange(seqlen_q, device=device)
        yield Work(b, h, rows, none, none, 1, seqlen_q, seqlen_k, 0)


def _by_lengths(problem: Problem) -> dict[tuple[int, int], list[int]]:
    lengths: dict[tuple[int, int], list[int]] = {}
    if not problem.heads_q:
        return lengths
    for b, pair in enumerate(zip(problem.seqlens_q, problem.seqlens_k, strict=True)):
        lengths.setdefault(pair, []).append(b)
    return lengths


def _sharing(
    tiles: TileRows, mask: Node, sequences: Sequence[int], heads: int, i: int
) -> Iterator[tuple[list[tuple[int, int]], np.ndarray, np.ndarray]]:
    """Pairs (b, h) grouped by the column tiles that row tile `i` visits."""
    groups: dict[tuple[bytes, bytes], list[tuple[int, int]]] = {}
    visits = {}
    for b in sequences if "b" in mask.free else sequences[:1]:
        for h in range(heads) if "h" in mask.free else range(1):
            visited, kinds = tiles.row(b, h, i)
            key = visited.tobytes(), kinds.tobytes()
            visits[key] = visited, kinds
            groups.setdefault(key, []).extend(
                (bb, hh)
                for bb in ([b] if "b" in mask.free else sequences)
                for hh in ([h] if "h" in mask.free else range(heads))
            )
    for key, pairs in groups.items():
        if len(visits[key][0]):
            yield pairs, *visits[key]


def indices(item: Work, queries: Tensor, keys: Tensor) -> dict[str, Tensor]:
    """The variables of a block: (n, 1, 1), (t, 1) and (w,), which broadcast to (n, t, w)."""
    return {
        "b": item.b[:, None, None],
        "h": item.h[:, None, None],
        "q": queries[:, None],
        "k": keys,
        "seqlen_q": torch.tensor(item.seqlen_q, device=queries.device),
        "seqlen_k": torch.tensor(item.seqlen_k, device=queries.device),
    }


@attrs.frozen(eq=False)
class Scores:
    """Modified scores of a block and what their derivative needs.

    Attributes:
        values: (n, t, w) in the log2 domain; -inf where nothing is attended to.
        wanted: Values of the nodes asked for, broadcastable with `values`; meaningless where
            nothing is attended to.
    """

    values: Tensor
    wanted: list[Tensor]


def scores(
    q: Tensor,
    k: Tensor,
    program: Program,
    variables: dict[str, Tensor],
    scale: float,
    masked: bool,
    wanted: Sequence[Node] = (),
) -> Scores:
    """Scores of (n, t, d) queries on (n, w, d) keys, masked and modified.

    A mod's value counts only where the mask is true: elsewhere it may be NaN, or index a captured
    tensor outside.
    """
    shape = (q.shape[0], q.shape[1], k.shape[1])
    live = None
    if masked:
        (live,) = evaluate([program.graph.mask], variables)
    plain = program.graph.score is algebra.var("score") and not wanted
    factor = scale * LOG2E if plain else scale
    values = torch.baddbmm(q.new_empty(shape), q, k.transpose(1, 2), beta=0, alpha=factor)
    rest: list[Tensor] = []
    if not plain:
        values, *rest = evaluate(
            [program.graph.score, *wanted],
            variables | {"score": values},
            dtype=q.dtype,
            live=live,
        )
        values = (values * LOG2E).expand(shape)
    if live is not None:
        values = torch.where(live, values, NEVER)
    return Scores(values.contiguous(), rest)
