"""Any mask at all, as a dense boolean tensor."""

from __future__ import annotations

import torch

from primitives.mask.core import Mask, named


def dense(allowed: torch.Tensor) -> Mask:
    """The mask that a boolean tensor spells out; the tensor is a run-time argument.

    Args:
        allowed: bool (seqlen_q, seqlen_k), (heads_q or 1, seqlen_q, seqlen_k) or
            (batch or 1, heads_q or 1, seqlen_q, seqlen_k); true attends. Any strides. Sizes of 1
            in front stand for all.

    Raises:
        TypeError, ValueError: Another dtype or rank.
    """
    if not isinstance(allowed, torch.Tensor) or allowed.dtype != torch.bool:
        given = getattr(allowed, "dtype", type(allowed).__name__)
        hint = ""
        if isinstance(allowed, torch.Tensor) and allowed.dtype.is_floating_point:
            hint = ". An additive bias is a score mod: score.dense_bias"
        raise TypeError(f"allowed is {given}; a bool tensor is accepted{hint}")
    if allowed.dim() not in (2, 3, 4):
        raise ValueError(
            f"allowed has shape {tuple(allowed.shape)}; (seqlen_q, seqlen_k), "
            "(heads, seqlen_q, seqlen_k) or (batch, heads, seqlen_q, seqlen_k) is accepted"
        )
    table, rank = allowed, allowed.dim()

    def dense_mask(b, h, q_idx, kv_idx):
        leading = (b, h)[4 - rank :]
        index = [0 if n == 1 else i for i, n in zip(leading, table.shape, strict=False)]
        return table[(*index, q_idx, kv_idx)]

    return named(f"dense{list(allowed.shape)}", dense_mask)
