"""The tiled reference, backward: one pass over the transposed tile map, as the kernels do it.

A work tile is a tile of keys; it visits the query tiles that attend to it, recomputes S and P from
the saved log-sum-exp, keeps dK and dV, and adds its share of dQ, in a fixed order, so that results
are reproducible bit by bit. See FlashAttention-4, section 3.2. Derivatives of the score mod and of
the sink are nodes of the program; captured tensors receive `dS * d value / d element`, added at the
element's index. `fa4core.ops` calls it.
"""

from __future__ import annotations

import attrs
import torch

from fa4core.lowering.torch import evaluate
from fa4core.reference.exp2 import exp2
from fa4core.reference.softmax import LOG2E, NEVER
from fa4core.reference.storage import Storage, accumulate, storages
from fa4core.reference.tiled import Call, sink
from fa4core.reference.work import Block, Work, all_queries, indices, scores, work
from primitives.expr import Capture, Node
from primitives.expr.trace import Derivative

Tensor = torch.Tensor


@attrs.frozen(eq=False)
class Gradients:
    """What the backward pass returns, each in its input's shape and dtype.

    Attributes:
        q: Gradient of the queries.
        k: Gradient of the keys.
        v: Gradient of the values.
        captured: Gradient of each captured tensor that a derivative names.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    captured: dict[Capture, Tensor]


def backward(
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
) -> Gradients:
    """Gradients of everything.

    Args:
        call: The call of the forward pass.
        q: As in the forward pass; likewise `k` and `v`.
        out: The forward pass's output.
        lse: Its log-sum-exp, (batch, heads_q, seqlen_q) or (heads_q, total_q).
        grad_out: Gradient of the output.
        grad_lse: Gradient of the log-sum-exp, or None.
    """
    pass_ = _Pass.start(call, q, k, v, out, lse, grad_out, grad_lse)
    items = work(
        call.tiles.transpose(),
        call.program.graph.mask,
        call.problem,
        call.tile_k,
        call.tile_q,
        q.device,
        rows_are_keys=True,
    )
    for item in items:
        pass_.keys(item)
    by_sink = sinks(call, out, lse, grad_out, grad_lse)
    return Gradients(
        (pass_.grad_q * call.scale).to(q.dtype),
        (pass_.grad_k * call.scale).to(k.dtype),
        pass_.grad_v.to(v.dtype),
        joined(pass_.captured, by_sink),
    )


def joined(*parts: dict[Capture, Tensor]) -> dict[Capture, Tensor]:
    """Sums of gradients of captured tensors, each in its tensor's dtype and on its device."""
    total: dict[Capture, Tensor] = {}
    for capture, gradient in (pair for part in parts for pair in part.items()):
        total[capture] = total[capture] + gradient if capture in total else gradient
    return {c: g.to(c.tensor) for c, g in total.items() if c.tensor is not None}


def sinks(
    call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> dict[Capture, Tensor]:
    """Gradients of what sinks capture, as far as they come from sinks; see `backward`.

    A sink has no query or key of its own: its weight follows from the LSE, and what it is given
    from the row's sum of dO * O, so that kernels have no part in it.
    """
    rule, real = call.program.sink_gradient, call.accumulator
    captured = {c: _accumulator(c, real) for c, _, _ in rule.captured}
    if not captured:
        return captured
    of_q, _ = storages(call.problem, call.layout, out.device)
    base, delta = statistics(call, out, lse, grad_out, grad_lse)
    for item in all_queries(call.problem, out.device):
        logits = sink(call, item)[..., None]
        p = torch.exp2(logits * LOG2E - of_q.read(base, item.b, item.h, item.rows))
        variables = indices(item, item.rows, item.rows[:1])
        _, *entries = evaluate(_nodes(rule), variables, dtype=real)
        share = -p * of_q.read(delta, item.b, item.h, item.rows)
        _add_captured(captured, rule, entries, share, logits == NEVER)
    return captured


def statistics(
    call: Call, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(..., seqlen_q, heads_q, 1): LSE, log2 domain, and delta, rowsum(dO * O) - dLSE.

    Rows with nothing to attend to, and those that are too `far` away, have no weights here: +inf,
    and 0 whatever the gradient of an infinite LSE is.
    """
    real = call.accumulator
    delta = (grad_out.to(real) * out.to(real)).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse.to(real).transpose(-1, -2)[..., None]
    rows = lse.to(real).transpose(-1, -2)[..., None] * LOG2E
    nothing = rows.abs() >= far(real)
    return torch.where(nothing, torch.inf, rows), torch.where(nothing, 0.0, delta)


def far(real: torch.dtype) -> float:
    """LSE, log2 domain, from which on a dtype is too coarse for weights to be made of it again.

    An LSE is rounded by up to 1 there. Exponents would be wrong by more and more, and weights that
    can't be above 1 be infinite; without weights, gradients are at least finite.
    """
    return 2.0 / torch.finfo(real).eps


@attrs.frozen(eq=False)
class _Pass:
    """The pass's inputs, and gradients so far (dQ and dK without the scale).

    Attributes:
        lse: See `statistics`; likewise `delta`.
    """

    call: Call
    of_q: Storage
    of_k: Storage
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    lse: Tensor
    delta: Tensor
    grad_q: Tensor
    grad_k: Tensor
    grad_v: Tensor
    captured: dict[Capture, Tensor]

    @classmethod
    def start(
        cls,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
    ) -> _Pass:
        real = call.accumulator
        base, delta = statistics(call, out, lse, grad_out, grad_lse)
        of_q, of_k = storages(call.problem, call.layout, q.device)
        return cls(
            call,
            of_q,
            of_k,
            q,
            k,
            v,
            grad_out,
            lse=base,
            delta=delta,
            grad_q=torch.zeros(q.shape, dtype=real, device=q.device),
            grad_k=torch.zeros(k.shape, dtype=real, device=k.device),
            grad_v=torch.zeros(v.shape, dtype=real, device=v.device),
            captured={c: _accumulator(c, real) for c, _, _ in call.program.score_gradient.captured},
        )

    def keys(self, item: Work) -> None:
        """One tile of keys: all its dK and dV, and its share of dQ."""
        real = self.call.accumulator
        kv_head = item.h // self.call.problem.group
        k = self.of_k.read(self.k, item.b, kv_head, item.rows).to(real)
        v = self.of_k.read(self.v, item.b, kv_head, item.rows).to(real)
        grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
        for block in item.shares(1)[0]:
            q = self.of_q.read(self.q, item.b, item.h, block.columns).to(real)
            grad_out = self.of_q.read(self.grad_out, item.b, item.h, block.columns).to(real)
            p, grad_s = self._scores(item, block, q, k, v, grad_out)
            grad_v.baddbmm_(p.transpose(1, 2), grad_out)
            grad_k.baddbmm_(grad_s.transpose(1, 2), q)
            self.of_q.add(self.grad_q, item.b, item.h, block.columns, grad_s @ k)
        self.of_k.add(self.grad_k, item.b, kv_head, item.rows, grad_k)
        self.of_k.add(self.grad_v, item.b, kv_head, item.rows, grad_v)

    def _scores(
        self, item: Work, block: Block, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """P and dS (n, queries, keys) of a block, rounded as the tensor cores take them."""
        rule, real = self.call.program.score_gradient, self.call.accumulator
        variables = indices(item, block.columns, item.rows)
        s = scores(q, k, self.call.program, variables, self.call.scale, block.masked, _nodes(rule))
        lse = self.of_q.read(self.lse, item.b, item.h, block.columns)
        delta = self.of_q.read(self.delta, item.b, item.h, block.columns)
        p = exp2(s.values - lse, self.call.exp, item.rows)
        grad_value = (grad_out @ v.transpose(1, 2)).sub_(delta).mul_(p)
        grad_s = grad_value
        if s.wanted:  # a derivative means nothing where nothing is attended to: it may be NaN
            dead = s.values == NEVER
            by_score, *entries = s.wanted
            grad_s = (grad_value * by_score).masked_fill_(dead, 0.0)
            _add_captured(self.captured, rule, entries, grad_value, dead)
        dtype = self.call.problem.dtype
        return p.to(dtype).to(real), grad_s.to(dtype).to(real)


def _add_captured(
    captured: dict[Capture, Tensor],
    rule: Derivative,
    entries: list[Tensor],
    gradient: Tensor,
    dead: Tensor,
) -> None:
    values = iter(entries)
    for capture, indices_, _ in rule.captured:
        where = [next(values) for _ in indices_]
        share = (gradient * next(values)).masked_fill_(dead, 0.0)
        scatter_add(captured[capture], where, share)


def _nodes(rule: Derivative) -> list[Node]:
    """The derivative's nodes in a row; none where it is that of the identity."""
    if rule.score.is_const and rule.score.attr == 1.0 and not rule.captured:
        return []
    return [rule.score, *(n for _, where, value in rule.captured for n in (*where, value))]


def _accumulator(capture: Capture, real: torch.dtype) -> Tensor:
    """Zeros; float64 where that is cheap, for sums over every score there is."""
    assert capture.tensor is not None
    precise = torch.float64 if capture.tensor.numel() <= 1 << 20 else real
    return torch.zeros(capture.tensor.shape, dtype=precise, device=capture.tensor.device)


def scatter_add(target: Tensor, where: list[Tensor], values: Tensor) -> None:
    """`target[where] += values`, in a fixed order.

    Args:
        target: Contiguous; any rank.
        where: An index for each dimension of `target`, broadcastable with `values`; negative ones
            count from the end, and those outside must belong to values of zero.
        values: What to add; summed first over dimensions that no index depends on.
    """
    shape = torch.broadcast_shapes(*(i.shape for i in where))
    shape = (1,) * (values.dim() - len(shape)) + shape
    summed = [d for d, n in enumerate(shape) if n == 1 and values.shape[d] > 1]
    if summed:
        values = values.sum(summed, keepdim=True)
    flat = torch.zeros((), dtype=torch.int64, device=values.device)
    for size, index in zip(target.shape, where, strict=True):
        inside = torch.where(index < 0, index + size, index)
        flat = flat * size + torch.where((inside >= 0) & (inside < size), inside, 0)
    values = values.expand(torch.broadcast_shapes(values.shape, flat.shape))
    flat = flat.expand(values.shape).reshape(-1).to(target.device)
    accumulate(target.view(-1), flat, values.reshape(-1).to(target))
