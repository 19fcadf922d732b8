"""The primitives that the composition table crosses, and how two of them make one call.

A `Feature` fills slots of a call: masks and score mods join (`&`, `>>`), every other slot holds one
value. Two features that want different values in one slot, such as two layouts, are alternatives;
all others compose. Used by `test_composition` and `table`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from fa4core.testing import Case, LayoutSpec, Shape

HEADS, BATCH, QUERIES, KEYS = 4, 2, 140, 200

_JOINED = {"mask": " & ", "score": " >> "}


@attrs.frozen(eq=False)
class Feature:
    """One row and column of the table.

    Attributes:
        name: As the table shows it.
        kind: Of primitive; rows are grouped by it.
        slots: What it fills: "mask", "score", "sink", "blocks", "exp", "rescale_threshold" as
            source text; "source", "order", "coordinates", "num_splits", "ctas" of a schedule;
            "layout"; "dtype"; "strides"; and the fields of `Shape`.
    """

    name: str
    kind: str
    slots: Mapping[str, Any]


def _features() -> tuple[Feature, ...]:
    longest = KEYS
    document = f"mask.document(integers(0, {BATCH}, {longest}, high=3).sort(-1).values)"
    table = f"bits(1, {HEADS})"
    by_kind: dict[str, dict[str, dict[str, Any]]] = {
        "mask": {
            "causal": {"mask": "mask.causal()"},
            "sliding window": {"mask": "mask.sliding_window(90, 20)"},
            "prefix": {"mask": "mask.prefix_lm(40)"},
            "documents": {"mask": document},
            "sink tokens": {"mask": "(mask.causal() | mask.sink_tokens(4))"},
            "per-head masks": {"mask": f"mask.select({table}, mask.causal(), ~mask.causal())"},
            "user's mask": {"mask": "mask.define(lambda b, h, q, k: (q + 3 * k) % 7 < 5)"},
            "block map": {
                "blocks": f"sparsity.BlockMap(bits(2, 1, {HEADS}, 3, 3), bits(3, 1, 1, 3, 3), "
                "block_q=64, block_k=96)"
            },
        },
        "score": {
            "ALiBi": {"score": f"score.alibi(normal(1, {HEADS}, std=0.2))"},
            "softcap": {"score": "score.softcap(20.0)"},
            "bias table": {"score": f"score.dense_bias(normal(4, {QUERIES}, {KEYS}))"},
            "user's score mod": {
                "score": "score.define(lambda s, b, h, q, k: s * (1.0 + 0.01 * (q - k).abs()))"
            },
        },
        "sink": {"sink": {"sink": f"sink.learned(normal(5, {HEADS}))"}},
        "exp": {
            "exp on FMA units": {"exp": "exp.polynomial(3)"},
            "exp mixed": {"exp": "exp.mixed(3, 0.25)"},
            "eager rescaling": {"rescale_threshold": "0.0"},
        },
        "schedule": {
            "one tile a CTA": {"source": "one_tile"},
            "dynamic": {"source": "dynamic"},
            "batch-sorted": {"order": "batch_sorted"},
            "shortest first": {"order": "shortest_first"},
            "packed GQA": {"coordinates": "packed_gqa"},
            "split keys": {"coordinates": "split_kv", "num_splits": 3},
            "pairs of CTAs": {"ctas": 2},
        },
        "sequence": {
            "seqused": {"layout": LayoutSpec("seqused", slack=3)},
            "varlen": {"layout": LayoutSpec("varlen")},
            "varlen + seqused": {"layout": LayoutSpec("varlen_seqused", slack=5)},
            "paged": {"layout": LayoutSpec("paged", page_size=64)},
            "paged varlen": {"layout": LayoutSpec("paged_varlen", page_size=128)},
        },
        "shape": {
            "GQA": {"heads_kv": 2},
            "MQA": {"heads_kv": 1},
            "one query": {"seqlens_q": (1, 1)},
            "empty sequences": {"seqlens_q": (0, QUERIES), "seqlens_k": (KEYS, 0)},
            "d 40, d_v 24": {"head_dim": 40, "head_dim_v": 24},
            "d 128": {"head_dim": 128, "head_dim_v": 128},
            "d 192, d_v 128": {"head_dim": 192, "head_dim_v": 128},
            "d 256": {"head_dim": 256, "head_dim_v": 256},
        },
        "tensors": {
            "float16": {"dtype": "float16"},
            "heads first": {"strides": "heads_first"},
            "sliced": {"strides": "sliced"},
            "expanded heads": {"strides": "expanded"},
        },
    }
    return tuple(
        Feature(name, kind, slots)
        for kind, group in by_kind.items()
        for name, slots in group.items()
    )


FEATURES = _features()


def together(*features: Feature) -> dict[str, Any] | None:
    """The slots of several features, or None if they want different values in one."""
    slots: dict[str, Any] = {}
    for feature in dict.fromkeys(features):
        for name, value in feature.slots.items():
            if name not in slots:
                slots[name] = value
            elif name in _JOINED:
                slots[name] += _JOINED[name] + value
            elif slots[name] != value:
                return None
    return slots


def case_of(slots: Mapping[str, Any], seed: int = 0) -> Case:
    """The call that slots describe; what they leave open is small and plain."""
    rest = dict(slots)
    schedule = {
        name: rest.pop(name)
        for name in ("source", "order", "coordinates", "num_splits", "ctas")
        if name in rest
    }
    parts = [
        f"{name}={rest.pop(name)}"
        for name in ("mask", "score", "sink", "blocks", "exp", "rescale_threshold")
        if name in rest
    ]
    if schedule:
        arguments = ", ".join(f"{name}={value!r}" for name, value in schedule.items())
        parts.append(f"schedule=schedule.Schedule({arguments})")
    layout, dtype = rest.pop("layout", None), rest.pop("dtype", "bfloat16")
    strides = rest.pop("strides", "contiguous")
    shape = Shape(
        **{
            "seqlens_q": (QUERIES,) * BATCH,
            "seqlens_k": (KEYS,) * BATCH,
            "heads_q": HEADS,
            "heads_kv": HEADS,
            "head_dim": 64,
            "head_dim_v": 64,
        }
        | rest
    )
    if layout is None:
        layout = LayoutSpec() if shape.is_uniform else LayoutSpec("varlen")
    return Case(
        f"Variant({', '.join(parts)})", shape, layout, dtype=dtype, strides=strides, seed=seed
    )
