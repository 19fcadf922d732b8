"""Every prebuilt mask and score mod with random arguments, as source text.

The catalogues map a name to a strategy for its source; whoever adds a prebuilt mask or score mod
adds a line here and its independent definition in `tests/soundness/naive.py`, and every property
test covers it. Used by `strategies`.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis.strategies import SearchStrategy, booleans, builds, integers, just, sampled_from

from fa4core.testing.case import Limits

Text = SearchStrategy[str]
Catalogue = dict[str, Callable[[Limits], Text]]

_ALIGN = sampled_from(["", ", align='top_left'"])
_WIDTH = integers(0, 150)
_SEED = integers(0, 3)
_SIZE = integers(1, 70)


def _text(form: str, **parts: SearchStrategy) -> Text:
    """`form` with its fields drawn."""
    return builds(form.format, **parts)


def _window(limits: Limits) -> Text:
    side = sampled_from([0, 1, 5, 63, 64, 65, 130, None])
    per_head = _text(
        f"mask.sliding_window(integers({{s}}, {limits.heads}, high=90), {{r}}{{a}})",
        s=_SEED, r=side, a=_ALIGN,
    )  # fmt: skip
    return _text("mask.sliding_window({l}, {r}{a})", l=side, r=side, a=_ALIGN) | per_head


def _document(limits: Limits) -> Text:
    longest = max(limits.seqlen_q, limits.seqlen_k)
    ids = f"integers({{s}}, {limits.batch}, {longest}, high={{n}})"
    return _text(f"mask.document({ids}{{order}})", s=_SEED, n=integers(1, 6), order=sampled_from(
        [".sort(-1).values", ""]
    ))  # fmt: skip


def _global(limits: Limits) -> Text:
    longest = max(limits.seqlen_q, limits.seqlen_k)
    table = f"mask.global_tokens(bits({{s}}, {longest}, density=0.1))"
    return _text("mask.global_tokens({n})", n=integers(0, 9)) | _text(table, s=_SEED)


def _natten(limits: Limits) -> Text:
    """A canvas that holds every query and key of the problem, in one or two axes."""
    tokens = max(limits.seqlen_q, limits.seqlen_k)
    length = max(tokens, 12)
    line = _text(
        f"mask.natten({length}, {{k}}, dilation={{d}}, causal={{c}})",
        k=integers(1, 6), d=integers(1, 2), c=booleans(),
    )  # fmt: skip
    width = 8
    height = max(-(-tokens // width), 8)
    plane = _text(
        f"mask.natten(({height}, {width}), ({{k}}, {{n}}), "
        "stride=({t}, 1), causal=({c}, False))",
        k=integers(2, 7), n=integers(1, 8), t=integers(1, 2), c=booleans(),
    )  # fmt: skip
    return line | plane


def _dense(limits: Limits) -> Text:
    shape = f"{limits.heads}, {limits.seqlen_q}, {limits.seqlen_k}"
    return _text(f"mask.dense(bits({{s}}, {shape}, density={{p}}))", s=_SEED, p=sampled_from(
        [0.5, 0.02, 0.98]
    ))  # fmt: skip


def _tree(limits: Limits) -> Text:
    """A random tree of as many nodes as there are queries."""
    n = limits.seqlen_q
    return _text(
        f"mask.tree((integers({{s}}, {n}, high=1 << 20) % torch.arange(1, {n} + 1)).int() - 1)",
        s=_SEED,
    )


def _shared_prefix(limits: Limits) -> Text:
    longest = max(limits.seqlen_q, limits.seqlen_k)
    return _text(f"mask.shared_prefix([0, {{n}}, {{n}} + {longest}])", n=_SIZE)


MASKS: Catalogue = {
    "full": lambda _: just("mask.full()"),
    "causal": lambda _: sampled_from(["mask.causal()", "mask.causal(align='top_left')"]),
    "sliding_window": _window,
    "sink_tokens": lambda _: _text("mask.sink_tokens({n})", n=integers(0, 70)),
    "prefix_lm": lambda _: _text("mask.prefix_lm({n}{a})", n=_WIDTH, a=_ALIGN),
    "document": _document,
    "dilated_window": lambda _: _text(
        "mask.dilated_window({n}, {d}{a})",
        n=sampled_from([0, 7, 40, None]),
        d=integers(1, 9),
        a=_ALIGN,
    ),
    "chunked": lambda _: _text("mask.chunked({n}{a})", n=_SIZE, a=_ALIGN),
    "block_causal": lambda _: _text("mask.block_causal({n}{a})", n=_SIZE, a=_ALIGN),
    "block_diffusion": lambda _: _text("mask.block_diffusion({n})", n=_SIZE),
    "global_tokens": _global,
    "natten": _natten,
    "dense": _dense,
    "tree": _tree,
    "shared_prefix": _shared_prefix,
    "random": lambda _: _text(
        "mask.random({p}, seed={s})", p=sampled_from([0.5, 0.01, 0.99]), s=_SEED
    ),
}

#: Masks that read no table by position, so they may be shifted without reading outside one.
SHIFTABLE = (
    "full", "causal", "sliding_window", "sink_tokens", "prefix_lm", "dilated_window", "chunked",
    "block_causal", "block_diffusion",
)  # fmt: skip


def _table(form: str, *shape: int, std: float = 1.0) -> Text:
    """A score mod of one learned table of the given shape."""
    size = ", ".join(map(str, shape))
    make = f"normal({{s}}, {size})" if std == 1.0 else f"normal({{s}}, {size}, std={std})"
    return _text(form.replace("TABLE", make), s=_SEED, a=_ALIGN)


def _longest(limits: Limits) -> int:
    return max(limits.seqlen_q, limits.seqlen_k)


def _alibi(limits: Limits) -> Text:
    fixed = _text(f"score.alibi({limits.heads}{{a}})", a=_ALIGN)
    learned = _table("score.alibi(TABLE{a})", limits.heads, std=0.2)
    return fixed | learned | _table("score.alibi(TABLE{a})", limits.batch, limits.heads, std=0.2)


def _dense_bias(limits: Limits) -> Text:
    lengths = limits.seqlen_q, limits.seqlen_k
    return _table("score.dense_bias(TABLE)", *lengths) | _table(
        "score.dense_bias(TABLE)", limits.batch, 1, *lengths
    )


def _graphormer_edge(limits: Limits) -> Text:
    nodes, places = _longest(limits), 3
    return _text(
        f"score.graphormer_edge(normal({{s}}, {limits.heads}, {places}, 5), "
        f"integers({{s}}, {nodes}, {nodes}, {places}, high=5), "
        f"integers({{s}}, {nodes}, {nodes}, high={places + 1}))",
        s=_SEED,
    )


def _graphormer_spatial(limits: Limits) -> Text:
    nodes = _longest(limits)
    return _text(
        f"score.graphormer_spatial(normal({{s}}, {limits.heads}, 6), "
        f"integers({{s}}, {nodes}, {nodes}, high=6))",
        s=_SEED,
    )


def _ssmax(limits: Limits) -> Text:
    return _table("score.ssmax(TABLE, causal=True{a})", limits.heads) | just(
        "score.ssmax(0.4, causal=False)"
    )


SCORES: Catalogue = {
    "identity": lambda _: just("score.identity()"),
    "softcap": lambda _: _text("score.softcap({c})", c=sampled_from(["20.0", "2.0", "50"])),
    "alibi": _alibi,
    "head_scale": lambda limits: _table("score.head_scale(TABLE)", limits.heads),
    "query_scale": lambda limits: _table("score.query_scale(TABLE)", limits.seqlen_q),
    "dense_bias": _dense_bias,
    "forgetting": lambda limits: _table(
        "score.forgetting(TABLE)", limits.batch, limits.heads, _longest(limits)
    ),
    "decay": lambda limits: _text(f"score.decay({limits.heads}{{a}})", a=_ALIGN),
    "relative_bias": lambda limits: _table("score.relative_bias(TABLE{a})", limits.heads, 11),
    "t5_bias": lambda limits: _table("score.t5_bias(TABLE, max_distance=50{a})", 16, limits.heads),
    "sandwich": lambda limits: _text(
        f"score.sandwich({limits.heads}, {_longest(limits)}, dim=16{{a}})", a=_ALIGN
    ),
    "llama4_temperature": lambda _: _text("score.llama4_temperature({n}, 0.5)", n=_SIZE),
    "ssmax": _ssmax,
    "graphormer_spatial": _graphormer_spatial,
    "graphormer_edge": _graphormer_edge,
}
