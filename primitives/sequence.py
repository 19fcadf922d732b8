"""Sequence layouts: how a batch of sequences lies in memory.

A layout is orthogonal to the variant: indices that masks and mods see are local to the sequence
and `b` is its number, packed or not. Queries are padded (batch, seqlen_q, heads, d) or packed
(total_q, heads, d); keys and values are padded, packed, or in pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

OptionalTensor = torch.Tensor | None


@dataclass(frozen=True, eq=False)  # torch.compile traces its making, but not that of attrs.frozen
class Layout:
    """Where each sequence's queries and keys are; None where the tensor's own shape says it.

    Attributes:
        cu_seqlens_q: (batch + 1,) int32 cumulative query lengths of packed queries.
        cu_seqlens_k: (batch + 1,) int32 cumulative key lengths of packed keys.
        seqused_q: (batch,) int32: only the first so many queries of each sequence are real;
            outputs and gradients behind them are zero, their LSE is -inf.
        seqused_k: (batch,) int32: only the first so many keys of each sequence are real.
        page_table: (batch, max_pages) int32: page numbers of each sequence's keys; keys and values
            then have shape (num_pages, page_size, heads_kv, d) and `seqused_k` is needed.
        max_seqlen_q: Upper bound of the query lengths, where known; saves reading `cu_seqlens_q`.
        max_seqlen_k: Likewise for keys.
    """

    cu_seqlens_q: OptionalTensor = None
    cu_seqlens_k: OptionalTensor = None
    seqused_q: OptionalTensor = None
    seqused_k: OptionalTensor = None
    page_table: OptionalTensor = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None

    def __post_init__(self) -> None:
        for name, rank in _RANKS.items():
            _check(name, getattr(self, name), rank)
        if self.page_table is not None and self.seqused_k is None:
            raise ValueError("a page_table needs seqused_k, the number of keys of each sequence")
        if self.page_table is not None and self.cu_seqlens_k is not None:
            raise ValueError(
                "keys are either packed (cu_seqlens_k) or paged (page_table), not both"
            )

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that are set, by name."""
        return {n: t for n in _RANKS if (t := getattr(self, n)) is not None}

    @cached_property
    def identity(self) -> tuple[int | None, ...]:
        """Equal for another layout of the very same tensors, as long as they are alive."""
        return (*(id(getattr(self, n)) for n in _RANKS), self.max_seqlen_q, self.max_seqlen_k)


_RANKS = {"cu_seqlens_q": 1, "cu_seqlens_k": 1, "seqused_q": 1, "seqused_k": 1, "page_table": 2}


def _check(name: str, tensor: OptionalTensor, rank: int) -> None:
    if tensor is None:
        return
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in (torch.int32, torch.int64):
        given = getattr(tensor, "dtype", type(tensor).__name__)
        raise TypeError(f"{name} is {given}; an int32 or int64 tensor is accepted")
    if tensor.dim() != rank:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; {rank} dimensions are accepted")


def fixed(seqused_q: OptionalTensor = None, seqused_k: OptionalTensor = None) -> Layout:
    """Padded: q (batch, seqlen_q, heads_q, d), k and v (batch, seqlen_k, heads_kv, d)."""
    return Layout(seqused_q=seqused_q, seqused_k=seqused_k)


def varlen(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: OptionalTensor = None,
    *,
    seqused_q: OptionalTensor = None,
    seqused_k: OptionalTensor = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Layout:
    """Packed: q (total_q, heads_q, d), k and v (total_k, heads_kv, d).

    `cu_seqlens_k` defaults to `cu_seqlens_q` (self-attention).
    """
    return Layout(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )


def paged(
    page_table: torch.Tensor,
    seqused_k: torch.Tensor,
    *,
    cu_seqlens_q: OptionalTensor = None,
    seqused_q: OptionalTensor = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Layout:
    """Keys and values in pages (num_pages, page_size, heads_kv, d); queries padded or packed."""
    return Layout(
        cu_seqlens_q=cu_seqlens_q,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        page_table=page_table,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
