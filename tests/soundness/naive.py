"""A second reading of the same source text, with no graph, no tracing and no tiles.

`read(text)` runs the text that a strategy drew with other meanings of its names: masks are plain
functions on whole index grids, prebuilt masks are written down again from their definitions, and
attention is the textbook formula in float64. What the project computes of the text must agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import attrs
import torch
from naive_grid import Grid, at, call, place
from naive_scores import SCORE, NaiveScore

from fa4core.testing import source as real
from primitives.mask.core import Mask

Tensor = torch.Tensor


@attrs.frozen(eq=False)
class NaiveMask:
    of: Callable[[Grid], Tensor]

    def __and__(self, other):
        return NaiveMask(lambda g: self.of(g) & other.of(g))

    def __or__(self, other):
        return NaiveMask(lambda g: self.of(g) | other.of(g))

    def __xor__(self, other):
        return NaiveMask(lambda g: self.of(g) != other.of(g))

    def __sub__(self, other):
        return NaiveMask(lambda g: self.of(g) & ~other.of(g))

    def __invert__(self):
        return NaiveMask(lambda g: ~self.of(g))

    def shift(self, q=0, k=0):
        return NaiveMask(lambda g: self.of(g.moved(q, k)))

    def restrict(self, *, q, k):
        def inside(g):
            return (g.q >= q[0]) & (g.q < q[1]) & (g.k >= k[0]) & (g.k < k[1])

        return NaiveMask(lambda g: self.of(g) & inside(g))


def _sliding_window(left, right=0, align="bottom_right"):
    def of(g):
        ahead = g.k - place(g, align)
        inside = torch.ones_like(g.q, dtype=torch.bool)
        if left is not None:
            inside &= -ahead <= at(left, g.h)
        if right is not None:
            inside &= ahead <= at(right, g.h)
        return inside

    return NaiveMask(of)


def _dilated_window(left, dilation, right=0, align="bottom_right"):
    window = _sliding_window(left, right, align)
    return NaiveMask(lambda g: window.of(g) & ((place(g, align) - g.k) % dilation == 0))


def _blocks(relation, align):
    return NaiveMask(lambda g: relation(place(g, align), g.k))


def _block_diffusion(block):
    def of(g):
        half = g.seqlen_k // 2
        q_clean, k_clean = g.q >= half, g.k >= half
        q_block = torch.where(q_clean, g.q - half, g.q) // block
        k_block = torch.where(k_clean, g.k - half, g.k) // block
        return torch.where(
            k_clean,
            torch.where(q_clean, k_block <= q_block, k_block < q_block),
            ~q_clean & (k_block == q_block),
        )

    return NaiveMask(of)


def _token(table, g, index):
    return table[index] if table.dim() == 1 else table[g.b, index]


def _document(ids):
    return NaiveMask(lambda g: _token(ids, g, g.q) == _token(ids, g, g.k))


def _global(tokens):
    if isinstance(tokens, Tensor):
        return NaiveMask(lambda g: _token(tokens, g, g.q) | _token(tokens, g, g.k))
    return NaiveMask(lambda g: (g.q < tokens) | (g.k < tokens))


def _dense(allowed):
    def of(g):
        grid = {2: (), 3: (g.h,), 4: (g.b, g.h)}[allowed.dim()]
        shape = (*g.q.shape[:1],) if allowed.dim() > 2 else ()
        assert allowed.dim() == 2 or allowed.shape[-3] in (1, *shape)
        return allowed[(*grid, g.q, g.k)]

    return NaiveMask(of)


def neighbours(length: int, kernel: int, dilation: int, stride: int, causal: bool) -> Tensor:
    """bool (length, length): NATTEN's definition for one axis, position by position."""
    allowed = torch.zeros(length, length, dtype=torch.bool)
    for q in range(length):
        group = list(range(q % dilation, length, dilation))  # positions of q's residue class
        i = group.index(q)
        first = i - i % stride  # the first query of those that share a window
        if causal:
            leader = min(first + stride - 1, len(group) - 1)
            window = range(max(0, leader - kernel + 1), i + 1)
        else:
            leader = min(first + stride // 2, len(group) - 1)
            start = min(max(leader - kernel // 2, 0), len(group) - kernel)
            window = range(start, start + kernel)
        allowed[q, [group[j] for j in window]] = True
    return allowed


def _natten(canvas, kernel, dilation=1, stride=1, causal=False):
    lengths = (canvas,) if isinstance(canvas, int) else canvas

    def each(value):
        return value if isinstance(value, tuple) else (value,) * len(lengths)

    tables = [
        neighbours(*row)
        for row in zip(lengths, *map(each, (kernel, dilation, stride, causal)), strict=True)
    ]

    def of(g):
        inside = torch.ones_like(g.q, dtype=torch.bool)
        step = math.prod(lengths)
        for length, table in zip(lengths, tables, strict=True):
            step //= length
            inside &= table[g.q // step % length, g.k // step % length]
        return inside

    return NaiveMask(of)


def _tree(parents):
    def of(g):
        nodes = len(parents)
        path = torch.zeros(nodes, nodes, dtype=torch.bool)
        for i in range(nodes):
            j = i
            while j >= 0:
                path[i, j] = True
                j = int(parents[j])
        node = g.k - (g.seqlen_k - g.seqlen_q)
        return (node < 0) | path[g.q, node.clamp(min=0)]

    return NaiveMask(of)


def _shared_prefix(offsets):
    def of(g):
        ends = torch.tensor(offsets)[1:]
        segment_q, segment_k = (
            torch.bucketize(x.contiguous(), ends, right=True) for x in (g.q, g.k)
        )
        return (g.k <= g.q) & ((segment_k == segment_q) | (segment_k == 0))

    return NaiveMask(of)


def _random(keep, seed=0):
    from primitives.mask.random import RANGE, hashed

    threshold = round(keep * RANGE)
    return NaiveMask(lambda g: hashed(torch.tensor(seed), g.b, g.h, g.q, g.k) < threshold)


def _per_head(masks):
    def of(g):
        stacked = torch.stack([m.of(g) for m in masks])
        choice = g.h.clamp(max=len(masks) - 1)
        return stacked.gather(0, choice[None])[0]

    return NaiveMask(of)


def _select(heads, chosen, otherwise):
    return NaiveMask(lambda g: torch.where(heads[g.h], chosen.of(g), otherwise.of(g)))


MASK = SimpleNamespace(
    full=lambda: NaiveMask(lambda g: torch.ones_like(g.q, dtype=torch.bool)),
    causal=lambda align="bottom_right": NaiveMask(lambda g: g.k <= place(g, align)),
    sliding_window=_sliding_window,
    sink_tokens=lambda n: NaiveMask(lambda g: g.k < n),
    prefix_lm=lambda n, align="bottom_right": NaiveMask(
        lambda g: (g.k < n) | (g.k <= place(g, align))
    ),
    document=_document,
    dilated_window=_dilated_window,
    chunked=lambda n, align="bottom_right": _blocks(lambda q, k: q // n == k // n, align),
    block_causal=lambda n, align="bottom_right": _blocks(lambda q, k: k // n <= q // n, align),
    block_diffusion=_block_diffusion,
    global_tokens=_global,
    natten=_natten,
    dense=_dense,
    tree=_tree,
    shared_prefix=_shared_prefix,
    random=_random,
    define=lambda f: NaiveMask(lambda g: call(f, g)),
    per_head=_per_head,
    select=_select,
)


SINK = SimpleNamespace(
    constant=lambda logit: lambda b, h, q: torch.full(q.shape, logit, dtype=torch.float64),
    learned=lambda logits: lambda b, h, q: logits[h],
    define=lambda f: f,
)


@attrs.frozen(eq=False)
class NaiveBlocks:
    full: Tensor | None
    partial: Tensor | None
    block_q: int
    block_k: int

    def apply(self, mask: NaiveMask) -> NaiveMask:
        def of(g):
            i, j = g.q // self.block_q, g.k // self.block_k
            allowed = torch.zeros_like(g.q, dtype=torch.bool)
            for blocks, inside in ((self.full, True), (self.partial, mask.of(g))):
                if blocks is not None:
                    b = g.b if blocks.shape[0] > 1 else 0 * g.b
                    h = g.h if blocks.shape[1] > 1 else 0 * g.h
                    allowed |= blocks[b, h, i, j] & inside
            return allowed

        return NaiveMask(of)


def _from_topk(indices, count, *, block_q, block_k):
    chosen = torch.stack([(indices == j).any(-1) for j in range(count)], -1)
    return NaiveBlocks(None, chosen[None, None], block_q, block_k)


SPARSITY = SimpleNamespace(
    BlockMap=NaiveBlocks,
    from_blocks=lambda blocks, block_q, block_k: NaiveBlocks(None, blocks, block_q, block_k),
    from_topk=_from_topk,
)


@attrs.frozen(eq=False)
class NaiveVariant:
    mask: NaiveMask = attrs.field(factory=MASK.full)
    score: NaiveScore | None = None
    sink: Callable | None = None
    blocks: NaiveBlocks | None = None
    exp: object = None
    rescale_threshold: object = None
    schedule: object = None

    def allowed(self, g: Grid) -> Tensor:
        return (self.mask if self.blocks is None else self.blocks.apply(self.mask)).of(g)


@attrs.frozen(eq=False)
class Reading:
    """What a text means here, and the learned tables it made, float64 leaves."""

    value: object
    learned: list[tuple[Tensor, Tensor]]  # (float32 values, float64 leaf)


def read(text: str) -> Reading:
    learned: list[tuple[Tensor, Tensor]] = []

    def normal(seed, *shape, grad=True, std=1.0):
        values = real.normal(seed, *shape, grad=False, std=std)
        leaf = values.double().requires_grad_(grad)
        if grad:
            learned.append((values, leaf))
        return leaf

    names = {name: getattr(real, name) for name in real.__all__}
    names |= {"mask": MASK, "score": SCORE, "sink": SINK, "sparsity": SPARSITY}
    names |= {"Variant": NaiveVariant, "normal": normal}
    return Reading(eval(text, names), learned)


def dense_mask(text: str, b: int, heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """bool (heads, seqlen_q, seqlen_k): the mask that `text` describes."""
    value = read(text).value
    assert not isinstance(value, Mask)
    grid = Grid.of(b, heads, seqlen_q, seqlen_k)
    return value.of(grid).expand(grid.q.shape)


def attend(variant: NaiveVariant, b: int, q: Tensor, k: Tensor, v: Tensor, scale: float):
    """Textbook attention of one sequence in float64: one softmax over keys and sink.

    Args:
        q: (seqlen_q, heads_q, d); k, v: (seqlen_k, heads_kv, d).

    Returns:
        (seqlen_q, heads_q, d_v) and the LSE (seqlen_q, heads_q).
    """
    heads = q.shape[1]
    g = Grid.of(b, heads, q.shape[0], k.shape[0])
    of_head = torch.arange(heads) // (heads // k.shape[1])
    k, v = k[:, of_head], v[:, of_head]
    score = torch.einsum("ihd,jhd->hij", q, k) * scale
    if variant.score is not None:
        score = variant.score.of(score, g)
    score = torch.where(variant.allowed(g), score, -math.inf)
    sink = score.new_full(score.shape[:2], -math.inf)
    if variant.sink is not None:
        h, i = torch.meshgrid(torch.arange(heads), torch.arange(q.shape[0]), indexing="ij")
        sink = variant.sink(torch.full_like(h, b), h, i)
    logits = torch.cat([score, sink[..., None]], -1)
    top = logits.detach().amax(-1, keepdim=True)
    weight = (logits - torch.where(top == -math.inf, 0.0, top)).exp()
    total = weight.sum(-1, keepdim=True)
    some = total > 0
    p = weight / torch.where(some, total, 1.0)
    lse = torch.where(some, torch.where(some, total, 1.0).log() + top, -math.inf)[..., 0]
    return torch.einsum("hij,jhd->ihd", p[..., :-1], v), lse.T
