"""Score mods for `naive`: functions of score and index grids, written down from their papers."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import attrs
import torch
from naive_grid import Grid, at, call, place

Tensor = torch.Tensor


@attrs.frozen(eq=False)
class NaiveScore:
    of: Callable[[Tensor, Grid], Tensor]

    def __rshift__(self, other):
        return NaiveScore(lambda s, g: other.of(self.of(s, g), g))


def _bias(of: Callable[[Grid], Tensor]) -> NaiveScore:
    return NaiveScore(lambda s, g: s + of(g))


def _factor(of: Callable[[Grid], Tensor]) -> NaiveScore:
    return NaiveScore(lambda s, g: s * of(g))


def _ahead(g: Grid, align: str) -> Tensor:
    return g.k - place(g, align)


def _alibi(slopes, align="bottom_right"):
    if isinstance(slopes, int):
        slopes = torch.tensor(_paper_slopes(slopes), dtype=torch.float32).double()

    def of(g):
        slope = slopes[g.h] if slopes.dim() == 1 else slopes[g.b, g.h]
        return -slope * _ahead(g, align).abs()

    return _bias(of)


def _paper_slopes(heads: int) -> list[float]:
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2 ** (-8 * i / (2 * power)) for i in range(1, 2 * power, 2)][: heads - power]


def _decay(heads, align="bottom_right"):
    gammas = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(heads)], dtype=torch.float32)
    return _bias(lambda g: gammas.double()[g.h].log() * _ahead(g, align).abs())


def _relative_bias(table, align="bottom_right"):
    reach = (table.shape[1] - 1) // 2

    def of(g):
        distance = _ahead(g, align)
        nearest = torch.where(
            distance > reach, reach, torch.where(distance < -reach, -reach, distance)
        )
        return table[g.h, nearest + reach]

    return _bias(of)


def _t5_bucket(distance: int, buckets: int, max_distance: int) -> int:
    """The published rule for encoders, one distance at a time."""
    side = buckets // 2
    offset, far = (side if distance > 0 else 0), abs(distance)
    if far < side // 2:
        return offset + far
    share = math.log(far / (side // 2)) / math.log(max_distance / (side // 2))
    return offset + min(side // 2 + int(share * (side - side // 2)), side - 1)


def _t5_bias(table, max_distance, align="bottom_right"):
    def of(g):
        distance = _ahead(g, align)
        values = [_t5_bucket(d, len(table), max_distance) for d in distance.flatten().tolist()]
        return table[torch.tensor(values, dtype=torch.int64).reshape(distance.shape), g.h]

    return _bias(of)


def _sandwich(heads, seqlen, dim, align="bottom_right"):
    def of(g):
        distance = _ahead(g, align).abs().double()
        total = sum(torch.cos(distance / 10000 ** (2 * i / dim)) for i in range(dim // 2))
        return heads / (8.0 * (g.h + 1)) * total

    return _bias(of)


def _llama4(floor, strength):
    def of(g):
        step = (g.place.clamp(min=0) + 1) // floor
        return 1 + strength * (1.0 + step.double()).log()

    return _factor(of)


def _ssmax(scales, causal=True, align="bottom_right"):
    def of(g):
        count = place(g, align).clamp(min=0) + 1 if causal else torch.full_like(g.q, g.seqlen_k)
        return at(scales, g.h) * count.double().log()

    return _factor(of)


def _graphormer_edge(table, types, lengths):
    def of(g):
        count, total = lengths[g.q, g.k], torch.zeros(g.q.shape, dtype=torch.float64)
        for step in range(table.shape[1]):
            value = table[g.h, step, types[g.q, g.k, step]]
            total = total + torch.where(step < count, value, 0.0)
        return total / count.clamp(min=1)

    return _bias(of)


SCORE = SimpleNamespace(
    define=lambda f: NaiveScore(lambda s, g: call(f, g, s)),
    identity=lambda: NaiveScore(lambda s, g: s),
    softcap=lambda cap: NaiveScore(lambda s, g: cap * torch.tanh(s / cap)),
    alibi=_alibi,
    head_scale=lambda scales: _factor(lambda g: scales[g.h]),
    query_scale=lambda scales: _factor(lambda g: scales[g.q]),
    dense_bias=lambda bias: _bias(
        lambda g: bias[g.q, g.k] if bias.dim() == 2 else bias[g.b, 0, g.q, g.k]
    ),
    forgetting=lambda gates: _bias(lambda g: gates[g.b, g.h, g.q] - gates[g.b, g.h, g.k]),
    decay=_decay,
    relative_bias=_relative_bias,
    t5_bias=_t5_bias,
    sandwich=_sandwich,
    llama4_temperature=_llama4,
    ssmax=_ssmax,
    graphormer_spatial=lambda table, distances: _bias(lambda g: table[g.h, distances[g.q, g.k]]),
    graphormer_edge=_graphormer_edge,
)
