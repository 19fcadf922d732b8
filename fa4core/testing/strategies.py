"""Hypothesis strategies for masks, score mods, sinks, block maps, shapes, layouts and whole cases.

Each draws source text or a frozen description first (see `fa4core.testing.source` and `case`) and
makes tensors last, so that examples shrink to full attention, one head and length 1, and print as
something to paste. Tables are exactly as large as the `Limits` say, hence an index outside the
problem is an index outside the table.

Example:
    ```python
    from hypothesis import given
    from fa4core.testing import assert_case_correct
    from fa4core.testing.strategies import cases

    @given(case=cases())
    def test_attention(case):
        assert_case_correct(case)
    ```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "fa4core.testing.strategies needs Hypothesis, an optional dependency; install it with "
        "`pip install 'fa4core[test]'` or `pip install hypothesis`"
    ) from error

from fa4core.testing.case import Case, Contents, LayoutKind, LayoutSpec, Limits, Shape, Strides
from fa4core.testing.expressions import mask_functions, score_functions
from fa4core.testing.prebuilt import MASKS, SCORES, SHIFTABLE
from fa4core.testing.source import build
from fa4core.variant import Variant

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

    from primitives.mask import Mask
    from primitives.score import ScoreMod
    from primitives.sink import Sink
    from primitives.sparsity import BlockMap

#: Limits where no shape is given: lengths behind one and two tile edges.
LIMITS = Limits(batch=2, heads=3, seqlen_q=150, seqlen_k=200)

#: Lengths around the edges of tiles of 64 and 128, the simplest first.
LENGTHS = (1, 2, 0, 7, 8, 63, 64, 65, 127, 128, 129, 130, 191, 192, 193, 255, 257, 300)

HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 96, 128, 192, 256)


# ------------------------------------------------------------------------------------- masks


@st.composite
def mask_sources(draw: DrawFn, limits: Limits = LIMITS, depth: int = 2) -> str:
    """Source text of masks: prebuilt ones, random functions, and compositions of them.

    Args:
        limits: Extents of the tables that masks may capture.
        depth: How deep compositions nest.
    """
    if depth == 0:
        return draw(_leaves(limits))
    kind = draw(st.sampled_from(_COMPOSITIONS))
    inner = mask_sources(limits, depth - 1)
    if kind == "leaf":
        return draw(_leaves(limits))
    if kind == "~":
        return f"~{draw(inner)}"
    if kind == "shift":
        name = draw(st.sampled_from(SHIFTABLE))
        q, k = draw(st.integers(-70, 70)), draw(st.integers(-70, 70))
        return f"{draw(MASKS[name](limits))}.shift(q={q}, k={k})"
    if kind == "restrict":
        ends = [sorted(draw(st.tuples(_edge, _edge))) for _ in "qk"]
        return f"({draw(inner)}).restrict(q={tuple(ends[0])}, k={tuple(ends[1])})"
    if kind == "per_head":
        return f"mask.per_head([{draw(inner)}, {draw(inner)}])"
    if kind == "select":
        table = f"bits({draw(st.integers(0, 3))}, {limits.heads})"
        return f"mask.select({table}, {draw(inner)}, {draw(inner)})"
    return f"({draw(inner)} {kind} {draw(inner)})"


_COMPOSITIONS = ("leaf", "&", "|", "~", "-", "^", "restrict", "shift", "select", "per_head")
_edge = st.integers(0, 220)


def _leaves(limits: Limits) -> SearchStrategy[str]:
    functions = mask_functions(limits).map(lambda text: f"mask.define({text})")
    return st.one_of(*(make(limits) for make in MASKS.values()), functions, functions, functions)


def masks(limits: Limits = LIMITS, depth: int = 2) -> SearchStrategy[Mask]:
    """Masks; their `name` is their source text. See `mask_sources`."""
    return mask_sources(limits, depth).map(build)


# ------------------------------------------------------------------------ scores, sinks, blocks


@st.composite
def score_sources(draw: DrawFn, limits: Limits = LIMITS) -> str:
    """Source text of score mods: prebuilt, random functions, and chains of up to three."""
    functions = score_functions(limits).map(lambda text: f"score.define({text})")
    leaf = st.one_of(*(make(limits) for make in SCORES.values()), functions, functions)
    return " >> ".join(draw(st.lists(leaf, min_size=1, max_size=3)))


def scores(limits: Limits = LIMITS) -> SearchStrategy[ScoreMod]:
    """Score mods, smooth in the score; learned tables among them require grad."""
    return score_sources(limits).map(build)


def sink_sources(limits: Limits = LIMITS) -> SearchStrategy[str]:
    """Source text of sinks: constant, learned for each head, or any function of (b, h, q_idx)."""
    learned = st.integers(0, 3).map(lambda s: f"sink.learned(normal({s}, {limits.heads}))")
    size = st.integers(1, 9)
    function = st.builds(
        lambda s, n: f"sink.define(lambda b, h, q_idx, t=normal({s}, {n}): t[q_idx % {n}])",
        st.integers(0, 3),
        size,
    )
    constant = st.sampled_from(["sink.constant(0.0)", "sink.constant(-2.5)", "sink.constant(4.0)"])
    return st.one_of(constant, learned, function)


def sinks(limits: Limits = LIMITS) -> SearchStrategy[Sink]:
    """Sinks; see `sink_sources`."""
    return sink_sources(limits).map(build)


@st.composite
def block_map_sources(draw: DrawFn, limits: Limits = LIMITS) -> str:
    """Source text of block maps: dense matrices, top-k indices, full and partial lists.

    Block sizes need not divide, or be divided by, a tile.
    """
    block_q, block_k = (draw(st.sampled_from([64, 128, 16, 48, 100, 1])) for _ in "qk")
    rows, columns = -(-limits.seqlen_q // block_q), -(-limits.seqlen_k // block_k)
    seed = draw(st.integers(0, 3))
    sizes = f"block_q={block_q}, block_k={block_k}"
    head = f"{draw(st.sampled_from([1, limits.batch]))}, {draw(st.sampled_from([1, limits.heads]))}"
    matrix = f"bits({seed}, {head}, {rows}, {columns})"
    kind = draw(st.sampled_from(["from_blocks", "full", "both", "from_topk"]))
    if kind == "from_topk":
        indices = f"integers({seed}, {rows}, 2, low=-1, high={columns})"
        return f"sparsity.from_topk({indices}, {columns}, {sizes})"
    if kind == "from_blocks":
        return f"sparsity.from_blocks({matrix}, {sizes})"
    partial = f"bits({seed + 1}, {head}, {rows}, {columns})" if kind == "both" else "None"
    return f"sparsity.BlockMap({matrix}, {partial}, {sizes})"


def block_maps(limits: Limits = LIMITS) -> SearchStrategy[BlockMap]:
    """Block maps; see `block_map_sources`."""
    return block_map_sources(limits).map(build)


# ---------------------------------------------------------------------------------- variants


@st.composite
def variant_sources(draw: DrawFn, limits: Limits = LIMITS, depth: int = 2) -> str:
    """Source text of variants; each part is there or not."""
    parts = []
    for name, strategy in (
        ("mask", mask_sources(limits, depth)),
        ("score", score_sources(limits)),
        ("sink", sink_sources(limits)),
        ("blocks", block_map_sources(limits)),
        ("exp", st.sampled_from(["exp.hardware()", "exp.polynomial(3)", "exp.mixed(5, 0.25)"])),
        ("rescale_threshold", st.sampled_from(["0.0", "8.0", "1.5"])),
        ("schedule", st.sampled_from(_SCHEDULES)),
    ):
        often = name in ("mask", "score")
        if draw(st.integers(0, 3)) > (1 if often else 2):
            parts.append(f"{name}={draw(strategy)}")
    return f"Variant({', '.join(parts)})"


_SCHEDULES = (
    "schedule.Schedule()",
    "schedule.split_kv(2)",
    "schedule.split_kv(5)",
    "schedule.Schedule(coordinates='packed_gqa')",
    "schedule.Schedule(source='dynamic', order='shortest_first')",
    "schedule.Schedule(source='one_tile', order='batch_sorted', l2_sections=False)",
)


def variants(limits: Limits = LIMITS, depth: int = 2) -> SearchStrategy[Variant]:
    """Whole variants for problems up to `limits`."""
    return variant_sources(limits, depth).map(build)


# --------------------------------------------------------------------- shapes, layouts, cases


def dtypes(*, half: bool = True, double: bool = False) -> SearchStrategy[str]:
    """Names of dtypes: float32, the half types, float64."""
    names = ["float32", *(["bfloat16", "float16"] if half else []), *(["float64"] * double)]
    return st.sampled_from(names)


@st.composite
def shapes(
    draw: DrawFn,
    *,
    ragged: bool = True,
    max_batch: int = 3,
    lengths: Sequence[int] = LENGTHS,
    head_dims: Sequence[int] = HEAD_DIMS,
) -> Shape:
    """Shapes: lengths around tile edges and zero, GQA, d_v different from d.

    Args:
        ragged: Sequences of different lengths; otherwise all of one.
        max_batch: Sequences at most.
        lengths: Where lengths are taken from, the simplest first.
        head_dims: Where head dims are taken from, the simplest first.
    """
    heads_kv, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3, 8]))
    dim = draw(st.sampled_from(head_dims))
    dim_v = dim if draw(st.booleans()) else draw(st.sampled_from(head_dims))
    batch = draw(st.integers(1, max_batch))
    pairs = st.tuples(st.sampled_from(lengths), st.sampled_from(lengths))
    if ragged:
        pair_list = draw(st.lists(pairs, min_size=batch, max_size=batch))
    else:
        pair_list = [draw(pairs)] * batch
    seqlens_q, seqlens_k = zip(*pair_list, strict=True)
    return Shape(seqlens_q, seqlens_k, heads_kv * group, heads_kv, dim, dim_v)


def layouts(kinds: Sequence[LayoutKind] = get_args(LayoutKind)) -> SearchStrategy[LayoutSpec]:
    """Layouts: padded, with `seqused`, packed, paged, and their combinations."""
    return st.builds(
        LayoutSpec,
        kind=st.sampled_from(kinds),
        page_size=st.sampled_from([16, 1, 7, 64, 128]),
        slack=st.sampled_from([0, 1, 3, 70]),
    )


@st.composite
def cases(
    draw: DrawFn,
    *,
    kinds: Sequence[LayoutKind] = get_args(LayoutKind),
    dtype: SearchStrategy[str] | None = None,
    lengths: Sequence[int] = LENGTHS,
    head_dims: Sequence[int] = HEAD_DIMS,
    depth: int = 2,
) -> Case:
    """Whole calls: variant x shape x layout x dtype x data, with tables of the problem's size.

    `case.inputs()` makes the tensors.
    """
    layout = draw(layouts(kinds))
    shape = draw(shapes(ragged=layout.kind != "fixed", lengths=lengths, head_dims=head_dims))
    return Case(
        variant=draw(variant_sources(shape.limits, depth)),
        shape=shape,
        layout=layout,
        dtype=draw(dtypes() if dtype is None else dtype),
        contents=draw(st.sampled_from(get_args(Contents))),
        strides=draw(st.sampled_from(get_args(Strides))),
        seed=draw(st.integers(0, 3)),
    )
