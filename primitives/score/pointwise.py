"""Score mods of the score alone, or of a captured bias or factor: caps, scales, dense biases."""

from __future__ import annotations

import torch

from primitives.arguments import at, checked_floats, number, shown
from primitives.score.core import ScoreMod, named


def softcap(cap: float | torch.Tensor) -> ScoreMod:
    """`cap * tanh(score / cap)`: scores stay within -cap and cap (Gemma 2, arXiv:2408.00118).

    Args:
        cap: Positive, run-time: a new one compiles nothing. (heads_q,) gives each head its own.

    Raises:
        ValueError, TypeError: Not a positive number.
    """
    bound = number(cap, "cap", positive=True, axis="heads_q")

    def softcap_mod(score, b, h, q_idx, kv_idx):
        return at(bound, h) * torch.tanh(score / at(bound, h))

    return named(f"softcap({shown(cap)})", softcap_mod)


def head_scale(scales: float | torch.Tensor) -> ScoreMod:
    """`score * scale`, each head its own.

    Args:
        scales: A float, or floating point () or (heads_q,); learned if it requires grad.
    """
    factor = number(scales, "scales", axis="heads_q")
    return named(
        f"head_scale({shown(scales)})", lambda score, b, h, q_idx, kv_idx: score * at(factor, h)
    )


def query_scale(scales: torch.Tensor) -> ScoreMod:
    """`score * scale`, each query its own: any temperature by position.

    Args:
        scales: Floating point (seqlen_q,), (batch, seqlen_q) or (batch, heads_q, seqlen_q); learned
            if it requires grad.
    """
    forms = "(seqlen_q,), (batch, seqlen_q) or (batch, heads_q, seqlen_q)"
    table = checked_floats(scales, "scales", (1, 2, 3), forms)

    def query_scale_mod(score, b, h, q_idx, kv_idx):
        leading = ((), (b,), (b, h))[table.dim() - 1]
        return score * table[(*leading, q_idx)]

    return named("query_scale", query_scale_mod)


def dense_bias(bias: torch.Tensor) -> ScoreMod:
    """`score + bias` with a bias for every pair of query and key.

    Args:
        bias: Floating point (seqlen_q, seqlen_k), (heads_q or 1, seqlen_q, seqlen_k) or
            (batch or 1, heads_q or 1, seqlen_q, seqlen_k), any strides; learned if it requires
            grad. Sizes of 1 in front stand for all.

    Raises:
        TypeError, ValueError: Another dtype or rank.
    """
    forms = (
        "(seqlen_q, seqlen_k), (heads, seqlen_q, seqlen_k) or (batch, heads, seqlen_q, seqlen_k)"
    )
    table = checked_floats(bias, "bias", (2, 3, 4), forms)

    def dense_bias_mod(score, b, h, q_idx, kv_idx):
        leading = (b, h)[4 - table.dim() :]
        index = [0 if n == 1 else i for i, n in zip(leading, table.shape, strict=False)]
        return score + table[(*index, q_idx, kv_idx)]

    return named(f"dense_bias{list(table.shape)}", dense_bias_mod)


def forgetting(cumulative_log_gates: torch.Tensor) -> ScoreMod:
    """`score + c[q] - c[k]`: attention that forgets (Lin et al., FoX, arXiv:2503.02130).

    Args:
        cumulative_log_gates: Floating point (batch, heads_q, seqlen): running sum of the logarithms
            of the forget gates; receives a gradient if it requires one.
    """
    gates = checked_floats(
        cumulative_log_gates, "cumulative_log_gates", (3,), "(batch, heads_q, seqlen)"
    )
    return named(
        "forgetting",
        lambda score, b, h, q_idx, kv_idx: score + (gates[b, h, q_idx] - gates[b, h, kv_idx]),
    )
