"""Score mods: what happens to a score before the softmax. They compose in order with `>>`.

`define` makes one of a plain Python function; the rest are prebuilt.
"""

from primitives.score.core import ScoreMod, define, identity
from primitives.score.graph import graphormer_edge, graphormer_spatial
from primitives.score.pointwise import dense_bias, forgetting, head_scale, query_scale, softcap
from primitives.score.position import (
    alibi,
    alibi_slopes,
    decay,
    llama4_temperature,
    relative_bias,
    sandwich,
    ssmax,
    t5_bias,
    t5_buckets,
)

__all__ = [
    "ScoreMod",
    "alibi",
    "alibi_slopes",
    "decay",
    "define",
    "dense_bias",
    "forgetting",
    "graphormer_edge",
    "graphormer_spatial",
    "head_scale",
    "identity",
    "llama4_temperature",
    "query_scale",
    "relative_bias",
    "sandwich",
    "softcap",
    "ssmax",
    "t5_bias",
    "t5_buckets",
]
