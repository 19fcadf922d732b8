"""`Rows`: where the rows of sequences lie in padded tensors. Imports no DSL.

Padded tensors have the rows of every sequence filled up to whole query tiles, one sequence behind
the other, so that a tile is a box of rows without an edge. Their first dimension is the query head.
"""

from __future__ import annotations

from functools import cached_property

import attrs
import numpy as np
import torch

from fa4core.plan.problem import Problem


@attrs.frozen(eq=False, slots=False)
class Rows:
    """See the module.

    Attributes:
        problem: Sizes.
        queries: Of a tile.
    """

    problem: Problem
    queries: int

    @cached_property
    def tiles(self) -> np.ndarray:
        """(batch,) query tiles of each sequence."""
        return -(-np.asarray(self.problem.seqlens_q, np.int64) // self.queries)

    @cached_property
    def starts(self) -> np.ndarray:
        """(batch,) the first row of each sequence."""
        return (np.cumsum(self.tiles) - self.tiles) * self.queries

    @property
    def count(self) -> int:
        """Rows of a head in all."""
        return int(self.tiles.sum()) * self.queries

    def table(self) -> torch.Tensor:
        """(tiles, 3) int32: of each tile the index into the batch mode of the queries, its first
        row there, and how many rows are the sequence's."""
        problem = self.problem
        b = np.repeat(np.arange(problem.batch), self.tiles)
        first = (np.arange(len(b)) - (self.starts // self.queries)[b]) * self.queries
        count = np.minimum(np.asarray(problem.seqlens_q, np.int64)[b] - first, self.queries)
        if problem.starts_q is not None:
            first, b = first + np.asarray(problem.starts_q, np.int64)[b], np.zeros_like(b)
        return torch.from_numpy(np.stack([b, first, count], axis=1).astype(np.int32))
