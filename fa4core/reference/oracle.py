"""The oracle: dense attention in float64, one sequence at a time, written to be read.

It is differentiable by torch autograd in every input - queries, keys, values, captured tensors and
sinks - so the gradient of the oracle is the gradient oracle. It shares with the rest of the project
only the expression graph and its evaluation; it knows nothing of tiles.
"""

from __future__ import annotations

import math

import torch

from fa4core.lowering.torch import evaluate
from fa4core.plan.problem import Problem
from fa4core.reference.storage import Storage, storages
from fa4core.variant import Variant, VariantGraph
from primitives.sequence import Layout

Tensor = torch.Tensor
NEVER = -float("inf")


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variant | None = None,
    *,
    layout: Layout | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention as it is defined, in float64 and in O(seqlen_q * seqlen_k) memory.

    Policies that change roundings only (exp, rescaling, schedule) have no meaning here.

    Args:
        q: (batch, seqlen_q, heads_q, d), or (total_q, heads_q, d) if packed.
        k: (batch, seqlen_k, heads_kv, d), (total_k, heads_kv, d) if packed, or
            (num_pages, page_size, heads_kv, d) if paged.
        v: As k, with d_v.
        variant: What to compute; None is full attention.
        layout: Where the sequences lie; None for padded tensors without padding.
        scale: Factor on q . k; None is 1 / sqrt(d).

    Returns:
        The output, as q with d_v; the log-sum-exp and the maximum of the modified scores, both
        (batch, heads_q, seqlen_q), packed (heads_q, total_q), in natural units. All float64. Rows
        behind `seqused_q` are 0, -inf and -inf.
    """
    variant = variant or Variant()
    problem = Problem.from_tensors(q, k, v, layout)
    scale = 1 / math.sqrt(problem.head_dim) if scale is None else scale
    of_q, of_k = storages(problem, layout, q.device)
    q, k, v = q.double(), k.double(), v.double()

    out = q.new_zeros((*q.shape[:-1], problem.head_dim_v))
    lse = q.new_full(q.shape[:-1], NEVER)  # (..., seqlen_q, heads_q) until the end
    row_max = q.new_full(q.shape[:-1], NEVER)
    for b in range(problem.batch):
        queries = _sequence(of_q, q, b, problem.seqlens_q[b])
        keys = _sequence(of_k, k, b, problem.seqlens_k[b])
        values = _sequence(of_k, v, b, problem.seqlens_k[b])
        results = attend(queries, keys, values, variant.graph, b, scale)
        place = _rows(of_q, q, b, problem.seqlens_q[b])
        out, lse, row_max = (
            whole.index_put(place, part.transpose(0, 1))
            for whole, part in zip((out, lse, row_max), results, strict=True)
        )
    return out, lse.transpose(-1, -2), row_max.transpose(-1, -2)


def _rows(storage: Storage, tensor: Tensor, b: int, length: int) -> tuple[Tensor, ...]:
    rows = torch.arange(length, device=tensor.device)
    return storage.index(torch.full_like(rows, b), rows)


def _sequence(storage: Storage, tensor: Tensor, b: int, length: int) -> Tensor:
    """(heads, length, d) of sequence `b`."""
    return tensor[_rows(storage, tensor, b, length)].transpose(0, 1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, graph: VariantGraph, b: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence.

    Args:
        q: (heads_q, seqlen_q, d) float64; `k`, `v` likewise with heads_kv.
        b: Its number, which masks and mods see.

    Returns:
        Output (heads_q, seqlen_q, d_v), LSE and row maximum (heads_q, seqlen_q).
    """
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = modified(q @ k.transpose(1, 2) * scale, graph, b)
    row_max = scores.detach().amax(-1) if k.shape[1] else scores.new_full(q.shape[:2], NEVER)

    (sink,) = evaluate([graph.sink], _indices(scores, b), dtype=torch.float64)
    sink = sink.expand(*q.shape[:2], 1).squeeze(-1)
    highest = torch.maximum(row_max, sink.detach())
    empty = highest == NEVER
    shift = torch.where(empty, 0.0, highest)  # exp(-inf - 0) = 0, never exp(-inf + inf)
    weights = torch.exp(scores - shift[..., None])
    total = weights.sum(-1) + torch.exp(sink - shift)
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, NEVER, torch.log(total) + shift)
    return (weights / total[..., None]) @ v, lse, row_max


def modified(scores: Tensor, graph: VariantGraph, b: int) -> Tensor:
    """Scores (heads_q, seqlen_q, seqlen_k) after mask and mod; -inf where nothing is attended to.

    The mod is evaluated for the attended elements only, as a list: what it would give elsewhere
    (a NaN, an index outside a table) is nobody's business, and has no gradient.
    """
    variables = _indices(scores, b)
    (mask,) = evaluate([graph.mask], variables)
    attended = mask.expand(scores.shape).nonzero(as_tuple=True)
    with torch.no_grad():  # a mod may say -inf: those elements are not attended to, either
        values = _mod(scores, graph, b, attended)
    attended = tuple(i[values != NEVER] for i in attended)
    values = _mod(scores, graph, b, attended)
    return torch.full_like(scores, NEVER).index_put(attended, values)


def _mod(scores: Tensor, graph: VariantGraph, b: int, where: tuple[Tensor, ...]) -> Tensor:
    variables = _indices(scores, b) | {
        "h": where[0],
        "q": where[1],
        "k": where[2],
        "score": scores[where],
    }
    (values,) = evaluate([graph.score], variables, dtype=scores.dtype)
    return values.expand(where[0].shape)


def _indices(scores: Tensor, b: int) -> dict[str, Tensor]:
    heads, rows, keys = (torch.arange(n, device=scores.device) for n in scores.shape)
    return {
        "b": torch.tensor(b, device=scores.device),
        "h": heads[:, None, None],
        "q": rows[:, None],
        "k": keys,
        "seqlen_q": torch.tensor(scores.shape[1], device=scores.device),
        "seqlen_k": torch.tensor(scores.shape[2], device=scores.device),
    }
