"""Masks by the distance of query and key: full, causal, windows, prefix, sinks."""

from __future__ import annotations

import torch

from primitives.arguments import Align, at, checked_align, position, shown, size, width
from primitives.expr import algebra
from primitives.mask.core import Mask, named


def full() -> Mask:
    """Every query attends to every key."""
    return Mask(algebra.TRUE, "full")


def causal(align: Align = "bottom_right") -> Mask:
    """A query attends to itself and what came before.

    Args:
        align: Where the diagonal lies if the lengths differ. `"bottom_right"`: the last query sees
            the last key. `"top_left"`: the first query sees the first key only (FlexAttention's
            and torch's `is_causal`).

    Raises:
        ValueError: Another `align`.
    """
    checked_align(align)

    def causal_mask(b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
        return kv_idx <= position(q_idx, align, seqlen_q, seqlen_k)

    return named("causal" if align == "bottom_right" else "causal(top_left)", causal_mask)


def sliding_window(
    left: int | torch.Tensor | None,
    right: int | torch.Tensor | None = 0,
    align: Align = "bottom_right",
) -> Mask:
    """A query attends to `left` keys before it, itself, and `right` keys after it.

    Widths are run-time arguments: a new one compiles nothing. (Longformer, arXiv:2004.05150;
    Mistral 7B, arXiv:2310.06825, whose window of W tokens is `left=W - 1`.)

    Args:
        left: Keys before the query; None for all. An integer tensor of shape (heads_q,) gives each
            head its own window.
        right: Keys after the query; None for all; or (heads_q,).
        align: As in `causal`.

    Raises:
        ValueError, TypeError: A width is negative, or no integer.
    """
    checked_align(align)
    before = None if left is None else width(left, "left")
    after = None if right is None else width(right, "right")
    if before is None and after is None:
        return full()

    def window_mask(b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
        distance = position(q_idx, align, seqlen_q, seqlen_k) - kv_idx
        inside: torch.Tensor | bool = True
        if before is not None:
            inside = distance <= at(before, h)
        if after is not None:
            inside = inside & (distance >= -at(after, h))
        return inside

    return named(f"sliding_window({shown(left)}, {shown(right)})", window_mask)


def dilated_window(
    left: int | torch.Tensor | None,
    dilation: int | torch.Tensor,
    right: int | torch.Tensor | None = 0,
    align: Align = "bottom_right",
) -> Mask:
    """Every `dilation`-th key of a sliding window, counted from the query itself.

    (Longformer, arXiv:2004.05150, section 3.1.) All of it is run-time.

    Args:
        left: How far before the query a key may lie, in keys (not in steps of the dilation); None
            for any distance; or (heads_q,).
        dilation: Distance of two attended keys, >= 1; or (heads_q,).
        right: How far behind the query, likewise.
        align: As in `causal`.

    Raises:
        ValueError, TypeError: A negative width, a dilation below 1, or no integers.
    """
    step = size(dilation, "dilation")

    def stride_mask(b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
        distance = position(q_idx, align, seqlen_q, seqlen_k) - kv_idx
        return distance % at(step, h) == 0

    mask = sliding_window(left, right, align) & named("dilated", stride_mask)
    text = ", ".join(shown(x) for x in (left, dilation, right))
    return mask.rename(f"dilated_window({text})")


def prefix_lm(prefix: int | torch.Tensor, align: Align = "bottom_right") -> Mask:
    """Everyone attends to the first `prefix` keys, and causally to the rest.

    (Raffel et al., T5, arXiv:1910.10683, section 3.2.1.)

    Args:
        prefix: Length of the prefix, run-time; an integer tensor of shape (batch,) gives each
            sequence its own.
        align: As in `causal`.

    Raises:
        ValueError, TypeError: A negative prefix, or no integer.
    """
    length = width(prefix, "prefix", "batch")
    prefix_mask = named("prefix", lambda b, h, q_idx, kv_idx: kv_idx < at(length, b))
    return (prefix_mask | causal(align)).rename(f"prefix_lm({shown(prefix)})")


def sink_tokens(count: int | torch.Tensor) -> Mask:
    """Every query attends to the first `count` keys (StreamingLLM's sinks, arXiv:2309.17453).

    Usually joined to a window: `causal() & sliding_window(1024) | causal() & sink_tokens(4)`.

    Args:
        count: Number of keys, run-time; or (heads_q,), each head its own.

    Raises:
        ValueError, TypeError: A negative count, or no integer.
    """
    bound = width(count, "count")
    return named(f"sink_tokens({shown(count)})", lambda b, h, q_idx, kv_idx: kv_idx < at(bound, h))
