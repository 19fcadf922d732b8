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
    return builds(lambda **values: form.format(**values), **parts)


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
        f"mask.natten(({height}, {width}), ({{k}}, {{n}}), stride=({{t}}, 1), causal=({{c}}, False))",
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
    "prefix_lm": lambda _: _text("mask.prefix_lm({n})", n=_WIDTH),
    "document": _document,
    "dilated_window": lambda _: _text(
        "mask.dilated_window({n}, {d})", n=integers(0, 20), d=integers(1, 9)
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

SCORES: Catalogue = {}
from primitives import mask as _m  # noqa
MASKS = {k: v for k, v in MASKS.items() if hasattr(_m, k)}
SHIFTABLE = tuple(n for n in SHIFTABLE if n in MASKS)
