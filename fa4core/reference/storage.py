"""Where the rows of each sequence lie: padded, packed or paged tensors behind one interface.

`Storage` answers "which elements of the tensor are rows `r` of sequence `b`" as index tensors, so
that nothing above it knows the layout. Used by the oracle and by the tiled reference.
"""

from __future__ import annotations

import attrs
import torch

from fa4core.plan.problem import Problem
from primitives.sequence import Layout

Tensor = torch.Tensor


@attrs.frozen(eq=False)
class Storage:
    """Index arithmetic of one operand (queries and outputs, or keys and values).

    Attributes:
        starts: (batch,) first row of each packed sequence, or None.
        page_table: (batch, max_pages) page of each stretch of keys, or None.
        page_size: Keys in a page.
    """

    starts: Tensor | None = None
    page_table: Tensor | None = None
    page_size: int = 1

    def index(self, b: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        """Index of rows `rows` of sequences `b` (broadcast together), without head and dim."""
        if self.page_table is not None:
            return self.page_table[b, rows // self.page_size].long(), rows % self.page_size
        if self.starts is not None:
            return (self.starts[b] + rows,)
        return b, rows

    def read(self, tensor: Tensor, b: Tensor, h: Tensor, rows: Tensor) -> Tensor:
        """`tensor`'s rows for pairs (b, h).

        Args:
            tensor: (..., heads, d) in this storage; any strides.
            b: (n,) sequence of each pair.
            h: (n,) head of each pair.
            rows: (w,) rows, the same for all pairs.

        Returns:
            (n, w, d), a copy.
        """
        return tensor[(*self.index(b[:, None], rows[None]), h[:, None])]

    def write(self, tensor: Tensor, b: Tensor, h: Tensor, rows: Tensor, value: Tensor) -> None:
        """Store (n, w, d) rows; pairs must be distinct."""
        tensor[(*self.index(b[:, None], rows[None]), h[:, None])] = value.to(tensor.dtype)

    def add(self, tensor: Tensor, b: Tensor, h: Tensor, rows: Tensor, value: Tensor) -> None:
        """Add (n, w, d) rows into a contiguous tensor; several may name one element."""
        index = (*self.index(b[:, None], rows[None]), h[:, None])
        flat = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for size, i in zip(tensor.shape[:-1], index, strict=True):
            flat = flat * size + i
        accumulate(tensor.view(-1, tensor.shape[-1]), flat.reshape(-1), value.flatten(0, 1))


def accumulate(target: Tensor, index: Tensor, value: Tensor) -> None:
    """`target[index] += value` along the first dimension, repeated indices in a fixed order."""
    if target.device.type == "cpu":
        target.index_add_(0, index, value)  # sequential
    else:
        target.index_put_((index,), value, accumulate=True)  # sorts first


def storages(problem: Problem, layout: Layout | None, device: torch.device) -> tuple[Storage, ...]:
    """The storage of the queries and that of the keys."""

    def tensor(values: tuple[int, ...] | None) -> Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.int64, device=device)

    queries = Storage(tensor(problem.starts_q))
    if problem.page_size is not None:
        assert layout is not None and layout.page_table is not None
        return queries, Storage(None, layout.page_table, problem.page_size)
    return queries, Storage(tensor(problem.starts_k))
