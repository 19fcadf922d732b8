"""Dense attention in plain torch: the yardstick that errors are measured with.

`plain` is what a user of torch would write without fa4core: the whole score matrix, operands at
the inputs' dtype, sums in float32. Knows the expression graph and torch; used by `magnitudes` and
`check`. It shares no code with the oracle, the interpreter or a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
import torch

from fa4core.lowering.torch import evaluate
from fa4core.plan.problem import Problem
from fa4core.variant import Variant
from primitives.sequence import Layout

Tensor = torch.Tensor


@attrs.frozen(eq=False)
class Outputs:
    """The outputs of an attention call.

    Attributes:
        out: Shaped as the queries, with the values' head dim.
        lse: (batch, heads_q, seqlen_q), or (heads_q, total_q) of packed queries; natural log.
        row_max: As `lse`: the largest score that a row attends to, -inf where there is none.
    """

    out: Tensor
    lse: Tensor
    row_max: Tensor


@attrs.frozen(eq=False)
class Rows:
    """Where a sequence's queries and keys are: the arguments that take them out of the tensors."""

    b: int
    q: tuple
    k: tuple | None
    pages: Tensor | None
    seqlen_k: int

    def queries(self, t: Tensor) -> Tensor:
        """(seqlen_q, heads, d) of the queries or outputs."""
        return t[self.q]

    def keys(self, t: Tensor) -> Tensor:
        """(seqlen_k, heads, d) of the keys or values."""
        if self.pages is None:
            return t[self.k]
        return t[self.pages].flatten(0, 1)[: self.seqlen_k]


def sequences(problem: Problem, layout: Layout | None) -> Iterator[Rows]:
    """The sequences of a problem and where they lie."""
    table = None if layout is None else layout.page_table
    for b, (m, n) in enumerate(zip(problem.seqlens_q, problem.seqlens_k, strict=True)):
        at_q = _rows(b, problem.starts_q, m)
        pages = None if table is None else table[b, : -(-n // (problem.page_size or 1))].long()
        yield Rows(b, at_q, None if pages is not None else _rows(b, problem.starts_k, n), pages, n)


def _rows(b: int, starts: tuple[int, ...] | None, length: int) -> tuple:
    if starts is None:
        return b, slice(0, length)
    return (slice(starts[b], starts[b] + length),)


@attrs.frozen(eq=False)
class Scores:
    """The dense matrices of one sequence, (heads_q, seqlen_q, seqlen_k) and (heads_q, seqlen_q).

    `raw` are scaled scores, `modified` those after the score mod, `masked` with -inf where the
    mask is false; `p` are the probabilities, `p_sink` the sink's share.
    """

    raw: Tensor
    modified: Tensor
    masked: Tensor
    mask: Tensor
    sink: Tensor
    p: Tensor
    p_sink: Tensor
    lse: Tensor
    row_max: Tensor


def indices(b: int, heads: int, seqlen_q: int, seqlen_k: int) -> dict[str, Tensor]:
    """The variables of mask and score functions, broadcasting to (heads, seqlen_q, seqlen_k)."""
    return {
        "b": torch.tensor(b),
        "h": torch.arange(heads)[:, None, None],
        "q": torch.arange(seqlen_q)[None, :, None],
        "k": torch.arange(seqlen_k)[None, None, :],
        "seqlen_q": torch.tensor(seqlen_q),
        "seqlen_k": torch.tensor(seqlen_k),
    }


def score_matrix(raw: Tensor, variant: Variant, b: int) -> Scores:
    """Mods, mask, sink and softmax of scaled scores (heads_q, seqlen_q, seqlen_k), in their dtype.

    A row with nothing to attend to has probabilities 0 and the LSE of its sink, or -inf.
    """
    graph, variables = variant.graph, indices(b, *raw.shape)
    (mask,) = evaluate([graph.mask], variables)
    (sink,) = evaluate([graph.sink], variables, dtype=raw.dtype)
    mask, sink = mask.expand(raw.shape), sink.expand(*raw.shape[:2], 1)[..., 0]
    # What a mod gives where nothing is attended to (NaN, an index outside) must not matter, even
    # in its derivative: there it sees the score 0.
    scored = variables | {"score": torch.where(mask, raw, 0.0)}
    (modified,) = evaluate([graph.score], scored, dtype=raw.dtype, live=mask)
    modified = modified.expand(raw.shape)
    masked = torch.where(mask, modified, -math.inf)
    bottom = raw.new_full((*raw.shape[:2], 1), -math.inf)
    row_max = torch.cat([masked.detach(), bottom], -1).amax(-1)
    shift = torch.maximum(row_max, sink.detach())
    shift = torch.where(shift == -math.inf, 0.0, shift)
    e, e_sink = (masked - shift[..., None]).exp(), (sink - shift).exp()
    total = e.sum(-1) + e_sink
    some = total > 0
    safe = torch.where(some, total, 1.0)
    lse = torch.where(some, safe.log() + shift, -math.inf)
    return Scores(
        raw, modified, masked, mask, sink, e / safe[..., None], e_sink / safe, lse, row_max
    )


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variant,
    layout: Layout | None = None,
    *,
    scale: float | None = None,
) -> Outputs:
    """The attention of `variant` in plain torch at the inputs' precision, differentiable.

    Operands of the matrix products (queries, keys, values, probabilities, and in the backward pass
    the gradients of scores and outputs) are held at the inputs' dtype; products are summed, and
    mods and softmax computed, in float32 (float64 for float64). That is torch's autocast without
    its rounding of the scores: the strictest of the spellings in use, hence a fair yardstick for
    kernels that accumulate in float32. Memory is proportional to the score matrix.

    Args:
        q, k, v, layout: As `fa4core.attention`.
        variant: Exp policy, rescale threshold and schedule don't matter here.
        scale: Of the scores; default 1/sqrt(head_dim).
    """
    problem = Problem.from_tensors(q, k, v, layout)
    compute = compute_dtype(q.dtype)
    factor = problem.head_dim**-0.5 if scale is None else scale
    shape = q.shape[:-1]
    out = q.new_zeros(*shape, problem.head_dim_v, dtype=compute)
    lse = torch.full(shape, -math.inf, dtype=compute)
    row_max = torch.full(shape, -math.inf, dtype=compute)
    for rows in sequences(problem, layout):
        q_b, k_b, v_b = rows.queries(q), rows.keys(k), rows.keys(v)
        q_h, k_h, v_h = (by_head(t.to(compute), problem.heads_q) for t in (q_b, k_b, v_b))
        raw = _rounded_gradient(q_h @ k_h.transpose(-1, -2), q.dtype) * factor
        s = score_matrix(raw, variant, rows.b)
        result = s.p.to(q.dtype).to(compute) @ v_h
        out[rows.q] = result.transpose(0, 1)
        lse[rows.q], row_max[rows.q] = s.lse.transpose(0, 1), s.row_max.transpose(0, 1)
    return Outputs(out.to(q.dtype), lse.transpose(-1, -2), row_max.transpose(-1, -2))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def by_head(t: Tensor, heads: int) -> Tensor:
    """(heads, seqlen, d) of (seqlen, heads_kv, d), each KV head repeated for its query heads."""
    return t.transpose(0, 1).repeat_interleave(heads // t.shape[1], dim=0)


def _rounded_gradient(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t`, whose gradient is rounded to `dtype`: it is an operand of the backward's products."""
    if t.requires_grad and t.dtype != dtype:
        t.register_hook(lambda g: g.to(dtype).to(g.dtype))
    return t
