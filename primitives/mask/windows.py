"""Masks by the distance of query and key: full, causal, sliding window, prefix, sinks."""

from __future__ import annotations

from typing import Literal

import torch

from primitives.expr import algebra
from primitives.mask.core import Mask, named
from primitives.scalar import parameter

Align = Literal["bottom_right", "top_left"]


def full() -> Mask:
    """Every query attends to every key."""
    return Mask(algebra.TRUE, "full")


def _shift(align: Align, seqlen_q: torch.Tensor, seqlen_k: torch.Tensor) -> torch.Tensor | int:
    if align not in ("bottom_right", "top_left"):
        raise ValueError(f"align={align!r}; accepted are 'bottom_right' and 'top_left'")
    return seqlen_k - seqlen_q if align == "bottom_right" else 0


def causal(align: Align = "bottom_right") -> Mask:
    """A query attends to itself and what came before.

    Args:
        align: Where the diagonal lies if the lengths differ. `"bottom_right"`: the last query sees
            the last key. `"top_left"`: the first query sees the first key only (FlexAttention's
            and torch's `is_causal`).
    """
    _shift(align, torch.tensor(0), torch.tensor(0))

    def causal_mask(b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
        return q_idx + _shift(align, seqlen_q, seqlen_k) >= kv_idx

    return named("causal" if align == "bottom_right" else "causal(top_left)", causal_mask)


def width(value: int | torch.Tensor, what: str) -> torch.Tensor:
    """A run-time scalar that must not be negative."""
    if not isinstance(value, torch.Tensor) and (not isinstance(value, int) or value < 0):
        raise ValueError(f"{what}={value!r}; a non-negative int or an integer tensor is accepted")
    if isinstance(value, torch.Tensor):
        if value.dtype.is_floating_point or value.dtype == torch.bool:
            raise TypeError(f"{what} is a {value.dtype} tensor; an integer tensor is accepted")
        if value.device.type == "cpu" and value.numel() and int(value.min()) < 0:
            raise ValueError(f"{what} has the value {int(value.min())}; it must not be negative")
        return value
    return parameter(value)


def sliding_window(
    left: int | torch.Tensor | None,
    right: int | torch.Tensor | None = 0,
    align: Align = "bottom_right",
) -> Mask:
    """A query attends to `left` keys before it, itself, and `right` keys after it.

    Widths are run-time arguments: a new one compiles nothing.

    Args:
        left: Keys before the query; None for all. An integer tensor of shape (heads,) gives each
            head its own window.
        right: Keys after the query; None for all.
        align: As in `causal`.
    """
    bounds = [
        None if side is None else width(side, name)
        for side, name in ((left, "left"), (right, "right"))
    ]

    def of_head(bound: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return bound[h] if bound.dim() else bound

    def window_mask(b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
        distance = q_idx + _shift(align, seqlen_q, seqlen_k) - kv_idx
        inside = torch.ones((), dtype=torch.bool)
        if bounds[0] is not None:
            inside = inside & (distance <= of_head(bounds[0], h))
        if bounds[1] is not None:
            inside = inside & (distance >= -of_head(bounds[1], h))
        return inside

    return named(f"sliding_window({left}, {right})", window_mask)


def sink_tokens(count: int | torch.Tensor) -> Mask:
    """Every query attends to the first `count` keys (StreamingLLM's attention sinks)."""
    bound = width(count, "count")
    return named(f"sink_tokens({count})", lambda b, h, q_idx, kv_idx: kv_idx < bound)
