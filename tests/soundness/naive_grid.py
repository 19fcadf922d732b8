"""Index grids for `naive`: one tensor of each index for every (head, query, key) of a sequence."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import attrs
import torch

Tensor = torch.Tensor


@attrs.frozen(eq=False)
class Grid:
    """The index grids of one sequence."""

    b: Tensor
    h: Tensor
    q: Tensor
    k: Tensor
    seqlen_q: int
    seqlen_k: int

    @classmethod
    def of(cls, b: int, heads: int, seqlen_q: int, seqlen_k: int) -> Grid:
        full = torch.meshgrid(
            torch.arange(heads), torch.arange(seqlen_q), torch.arange(seqlen_k), indexing="ij"
        )
        return cls(torch.full_like(full[0], b), *full, seqlen_q, seqlen_k)

    def moved(self, q: int, k: int) -> Grid:
        return attrs.evolve(self, q=self.q - q, k=self.k - k)

    @property
    def place(self) -> Tensor:
        """The key position of each query, the last query at the last key."""
        return self.q + self.seqlen_k - self.seqlen_q


def call(function: Callable, grid: Grid, *first: Tensor) -> Tensor:
    lengths = {"seqlen_q": torch.tensor(grid.seqlen_q), "seqlen_k": torch.tensor(grid.seqlen_k)}
    asked = inspect.signature(function).parameters
    keywords = {n: t for n, t in lengths.items() if n in asked}
    return function(*first, grid.b, grid.h, grid.q, grid.k, **keywords)


def place(g: Grid, align: str) -> Tensor:
    return g.place if align == "bottom_right" else g.q


def at(value, index):
    return value[index] if isinstance(value, Tensor) and value.dim() else value
