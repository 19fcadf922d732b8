"""Score mods by the distance or the position of query and key.

Biases are added to the scaled score; `align` says, as for masks, which position a query has if the
lengths differ: by default the last query stands at the last key.
"""

from __future__ import annotations

import math

import torch

from primitives.arguments import (
    Align,
    at,
    checked_align,
    checked_floats,
    number,
    position,
    shown,
    size,
)
from primitives.score.core import ScoreMod, named


def alibi_slopes(heads: int) -> torch.Tensor:
    """float32 (heads,): the slopes of the ALiBi paper for a number of heads.

    For a power of two n the geometric sequence 2^(-8/n), 2^(-16/n), ...; otherwise that of the
    power of two below, filled up with every other slope of the power of two above
    (Press et al., arXiv:2108.12409, and its published code).
    """
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
        raise ValueError(f"heads={heads!r}; an int >= 1 is accepted")
    below = 1 << (heads.bit_length() - 1)
    exponents = [8 / below * (i + 1) for i in range(below)]
    exponents += [4 / below * (2 * i + 1) for i in range(heads - below)]
    return torch.tensor([2.0**-e for e in exponents], dtype=torch.float32)


def alibi(slopes: int | torch.Tensor, align: Align = "bottom_right") -> ScoreMod:
    """`score - slope * |q - k|`: attention with linear biases (Press et al., arXiv:2108.12409).

    Args:
        slopes: Slope of each head, floating point (heads_q,) or (batch, heads_q); learned if it
            requires grad. An int takes the paper's slopes for that number of heads.
        align: Which position a query has if the lengths differ.

    Raises:
        TypeError, ValueError: Another dtype, rank or `align`.
    """
    checked_align(align)
    if not isinstance(slopes, int | torch.Tensor):
        raise TypeError(
            f"slopes is a {type(slopes).__name__}; accepted are a floating-point tensor (heads_q,) "
            "or (batch, heads_q), e.g. torch.tensor(slopes), or an int: the paper's slopes for so "
            "many heads"
        )
    if not isinstance(slopes, torch.Tensor):
        slopes = alibi_slopes(slopes)
    table = checked_floats(slopes, "slopes", (1, 2), "(heads_q,) or (batch, heads_q)")

    def alibi_mod(score, b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
        distance = (position(q_idx, align, seqlen_q, seqlen_k) - kv_idx).abs()
        slope = table[h] if table.dim() == 1 else table[b, h]
        return score - slope * distance

    return named("alibi", alibi_mod)


def decay(gammas: int | torch.Tensor, align: Align = "bottom_right") -> ScoreMod:
    """`score + |q - k| * log(gamma)`: weights that decay by gamma with every token of distance.

    What RetNet's decay (Sun et al., arXiv:2307.08621, section 2.2) is inside a softmax.

    Args:
        gammas: Decay of each head, in (0, 1], floating point (heads_q,); learned if it requires
            grad. An int takes RetNet's `1 - 2^(-5 - h)` for that number of heads.
        align: Which position a query has if the lengths differ.
    """
    checked_align(align)
    if not isinstance(gammas, torch.Tensor):
        heads = int(size(gammas, "heads"))
        gammas = 1 - torch.exp2(-5.0 - torch.arange(heads, dtype=torch.float32))
    table = checked_floats(gammas, "gammas", (1,), "(heads_q,)")

    def decay_mod(score, b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
        distance = (position(q_idx, align, seqlen_q, seqlen_k) - kv_idx).abs()
        return score + distance * torch.log(table[h])

    return named("decay", decay_mod)


def relative_bias(table: torch.Tensor, align: Align = "bottom_right") -> ScoreMod:
    """A learned bias for each distance from -m to m, the ends standing for all that is farther.

    (Clipping as in Shaw et al., arXiv:1803.02155, section 3.2.)

    Args:
        table: Floating point (2m + 1,) or (heads_q, 2m + 1); entry `m + d` belongs to keys d behind
            the query.
        align: Which position a query has if the lengths differ.

    Raises:
        TypeError, ValueError: Another dtype or rank, or an even number of entries.
    """
    checked_align(align)
    checked_floats(table, "table", (1, 2), "(2m + 1,) or (heads_q, 2m + 1)")
    entries = table.shape[-1]
    if entries % 2 == 0:
        raise ValueError(f"table has {entries} entries a head; an odd number, 2m + 1, is accepted")
    reach = entries // 2

    def relative_bias_mod(score, b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
        distance = kv_idx - position(q_idx, align, seqlen_q, seqlen_k)
        entry = distance.clamp(-reach, reach) + reach
        return score + (table[entry] if table.dim() == 1 else table[h, entry])

    return named(f"relative_bias({reach})", relative_bias_mod)


def t5_bias(
    table: torch.Tensor,
    *,
    bidirectional: bool = True,
    max_distance: int = 128,
    align: Align = "bottom_right",
) -> ScoreMod:
    """T5's relative bias: a learned value for each of a few buckets of distances.

    Small distances have a bucket each, larger ones share logarithmic ones (Raffel et al.,
    arXiv:1910.10683, section 2.1, and its published code). Buckets are looked up in a table of
    integers, so that every backend finds the same. T5 itself doesn't scale its scores: pass
    `scale=1.0` to the attention call.

    Args:
        table: Floating point (buckets, heads_q), as T5's embedding stores it.
        bidirectional: Half of the buckets for keys behind the query (encoders); otherwise those
            share bucket 0 (decoders).
        max_distance: From there on one bucket.
        align: Which position a query has if the lengths differ.

    Raises:
        TypeError, ValueError: Another dtype or rank, or too few buckets.
    """
    checked_align(align)
    checked_floats(table, "table", (2,), "(buckets, heads_q)")
    bucket_of = t5_buckets(table.shape[0], bidirectional, max_distance).to(table.device)

    def t5_bias_mod(score, b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
        distance = kv_idx - position(q_idx, align, seqlen_q, seqlen_k)
        bucket = bucket_of[distance.clamp(-max_distance, max_distance) + max_distance]
        return score + table[bucket, h]

    return named("t5_bias", t5_bias_mod)


def t5_buckets(buckets: int, bidirectional: bool = True, max_distance: int = 128) -> torch.Tensor:
    """int32 (2 * max_distance + 1,): T5's bucket of each distance k - q from -max_distance on."""
    side = buckets // 2 if bidirectional else buckets
    exact = side // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"{buckets} buckets with max_distance={max_distance}; at least "
            f"{4 if bidirectional else 2} buckets and a max_distance above {exact} are accepted"
        )
    distance = torch.arange(-max_distance, max_distance + 1)
    far = distance.abs() if bidirectional else (-distance).clamp(min=0)
    ratio = torch.log(far.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    large = (exact + (ratio * (side - exact)).long()).clamp(max=side - 1)
    bucket = torch.where(far < exact, far, large)
    if bidirectional:
        bucket = bucket + (distance > 0) * side
    return bucket.to(torch.int32)


def sandwich(heads: int, seqlen: int, dim: int = 128, align: Align = "bottom_right") -> ScoreMod:
    """The bias that sinusoidal position embeddings alone would give, compressed for each head.

    `score + heads / (8 (h + 1)) * sum_i cos(|q - k| / 10000^(2 i / dim))`
    (Chi et al., arXiv:2212.10356, section 5).

    Args:
        heads: Number of query heads.
        seqlen: Largest length it is used with; the sum is a table of so many entries.
        dim: Width of the embeddings that are imitated, even.
        align: Which position a query has if the lengths differ.
    """
    checked_align(align)
    size(heads, "heads"), size(seqlen, "seqlen"), size(dim, "dim")
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    distances = torch.arange(seqlen, dtype=torch.float64)
    bias = torch.cos(distances[:, None] * frequencies).sum(-1).float()
    ratio = heads / (8.0 * torch.arange(1, heads + 1, dtype=torch.float32))

    def sandwich_mod(score, b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
        distance = (position(q_idx, align, seqlen_q, seqlen_k) - kv_idx).abs()
        return score + bias[distance] * ratio[h]

    return named("sandwich", sandwich_mod)


def llama4_temperature(
    floor: float | torch.Tensor = 8192.0,
    strength: float | torch.Tensor = 0.1,
    align: Align = "bottom_right",
) -> ScoreMod:
    """`score * (1 + strength * log(1 + floor((position + 1) / floor)))`: sharper at long range.

    Llama 4's temperature for its layers without position embeddings (its published model code,
    after Nakanishi, arXiv:2501.19399).

    Args:
        floor: Positions in a step of the temperature, run-time.
        strength: How much each step adds, run-time.
        align: Which position a query has if the lengths differ.
    """
    checked_align(align)
    step, gain = number(floor, "floor", positive=True), number(strength, "strength")

    def temperature_mod(score, b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
        place = position(q_idx, align, seqlen_q, seqlen_k).clamp(min=0)
        return score * (1 + gain * torch.log1p(torch.floor((place + 1) / step)))

    return named(f"llama4_temperature({shown(floor)}, {shown(strength)})", temperature_mod)


def ssmax(
    scales: float | torch.Tensor, causal: bool = True, align: Align = "bottom_right"
) -> ScoreMod:
    """`score * s * log(n)`: scalable softmax (Nakanishi, arXiv:2501.19399).

    Args:
        scales: The factor s, a float or floating point () or (heads_q,); learned if it requires
            grad.
        causal: n is the number of keys up to the query; otherwise the number of all keys.
        align: Which position a query has if the lengths differ.
    """
    checked_align(align)
    factor = number(scales, "scales", axis="heads_q")

    def ssmax_mod(score, b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
        place = position(q_idx, align, seqlen_q, seqlen_k).clamp(min=0)
        count = place + 1 if causal else seqlen_k
        return score * (at(factor, h) * torch.log(count.float()))

    return named(f"ssmax({shown(scales)})", ssmax_mod)
