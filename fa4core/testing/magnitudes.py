"""How large the errors of each result may be: magnitudes, and what kernels approximate.

`sizes` gives for every element of every result the sum of the absolute values that it is computed
from, which says how far rounding moves it, and by how much it moves because kernels approximate
functions of the score mod. Knows `dense`, the expression graph and torch; used by `check`.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch

from fa4core.lowering.torch import evaluate
from fa4core.plan.problem import Problem
from fa4core.testing.dense import Rows, Scores, by_head, compute_dtype, indices, score_matrix
from fa4core.testing.dense import sequences as sequences_of
from fa4core.variant import Variant
from primitives.exp import Exp
from primitives.expr import Node, algebra, substitute, walk
from primitives.expr.trace import Derivative
from primitives.sequence import Layout

Tensor = torch.Tensor

#: Largest relative error of functions that kernels approximate in score mods of half types, by the
#: unit that computes them (`fa4core.lowering.approximate`).
QUICK_ERROR: dict[str, dict[str, float]] = {
    "mufu": {"tanh": 2.0**-11, "exp": 1e-6, "exp2": 1e-6, "sigmoid": 1e-6},
    "fma": {"tanh": 6.6e-4, "exp": 9e-5, "exp2": 9e-5, "sigmoid": 9e-5},
}


def quick_errors(exp: Exp) -> dict[str, float]:
    """The errors of functions by name under an exp policy, which also says who computes them."""
    by_mufu, by_fma = QUICK_ERROR["mufu"], QUICK_ERROR["fma"]
    if exp.fraction in (0, 1):
        return by_fma if exp.fraction else by_mufu
    return {name: max(error, by_fma[name]) for name, error in by_mufu.items()}


@attrs.frozen(eq=False)
class Sizes:
    """See `sizes`. Tensors are float64, in the shapes of what they describe.

    Attributes:
        magnitude: Of each element of "out", "dq", "dk", "dv" and "d<i>", the i-th captured tensor
            that requires grad: rounding each of the values that it is computed from once by a
            relative u changes it by at most u times this (Higham, Accuracy and Stability of
            Numerical Algorithms, sections 3.1 and 3.5).
        allowed: How much the same elements, "lse" and "row_max" may be wrong because functions are
            approximated; empty if none is.
        score: The largest `|scale| * sum(|q| |k|) + |modified score|` of an attended pair.
    """

    magnitude: Mapping[str, Tensor]
    allowed: Mapping[str, Tensor]
    score: float


@torch.no_grad()
def sizes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variant,
    layout: Layout | None,
    grad_out: Tensor,
    grad_lse: Tensor,
    *,
    scale: float | None = None,
    exp: Exp | None = None,
) -> Sizes:
    """How large the errors of each result may be.

    Args:
        q, k, v, variant, layout, scale: As of `fa4core.attention`.
        grad_out, grad_lse: Upstream gradients.
        exp: Policy of the kernel whose results are judged; None: nothing is approximated.
    """
    return _Sizes(q, k, v, variant, layout, grad_out, grad_lse, scale, exp).found()


class _Sums:
    """Results by name, added up over the sequences of a problem."""

    def __init__(self, problem: Problem, learned: list[Tensor], like: Mapping[str, Tensor]):
        self.problem, self.learned = problem, learned
        self.of = {n: torch.zeros(t.shape, dtype=torch.float64) for n, t in like.items()}

    def queries(self, name: str, rows: Rows, value: Tensor) -> None:
        """Add (heads_q, seqlen_q) or (heads_q, seqlen_q, d)."""
        total = self.of[name]
        total = total.transpose(-1, -2) if value.dim() == 2 else total
        total[rows.q] += value.transpose(0, 1)

    def keys(self, name: str, rows: Rows, value: Tensor) -> None:
        """Add (heads_q, seqlen_k, d), summed over the heads of each group."""
        value = value.unflatten(0, (-1, self.problem.group)).sum(1).transpose(0, 1)
        if rows.pages is None:
            self.of[name][rows.k] += value
            return
        size = self.problem.page_size or 1
        padded = value.new_zeros(len(rows.pages) * size, *value.shape[1:])
        padded[: len(value)] = value
        self.of[name][rows.pages] += padded.unflatten(0, (-1, size))

    def captured(self, derivative: Derivative, b: int, raw: Tensor, weight: Tensor) -> None:
        """Scatter `weight * |d value / d element|` to the elements of the captured tensors."""
        if raw.numel() == 0:
            return
        variables = indices(b, self.problem.heads_q, raw.shape[1], raw.shape[2]) | {"score": raw}
        for capture, index, node in derivative.captured:
            *at, slope = evaluate([*index, node], variables, dtype=torch.float64)
            position = next(i for i, t in enumerate(self.learned) if t is capture.tensor)
            total = self.of[f"d{position}"]
            value = (weight * slope.abs()).expand(raw.shape)
            if not at:
                total += value.sum()
                continue
            total.index_put_(tuple(i.expand(raw.shape) for i in at), value, accumulate=True)


@attrs.frozen(eq=False)
class _Sequence:
    """A sequence's tensors as (heads_q, rows, d), and what the results are linear in.

    Attributes:
        row: Of rowsum(dO * O) and d LSE, a magnitude.
        p: The weights.
        dp: Gradients of the weights, less the row's.
        ds: Gradients of modified scores.
        slope: d modified / d score.
    """

    rows: Rows
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    raw: Tensor
    s: Scores
    row: Tensor
    p: Tensor
    dp: Tensor
    ds: Tensor
    slope: Tensor


class _Sizes:
    """Makes `Sizes`, sequence by sequence."""

    def __init__(self, q, k, v, variant, layout, grad_out, grad_lse, scale, exp) -> None:
        problem = Problem.from_tensors(q, k, v, layout)
        self.problem, self.variant = problem, variant
        self.scale = problem.head_dim**-0.5 if scale is None else scale
        self.tiny = torch.finfo(q.dtype).smallest_normal
        # A derivative such as 1 - tanh^2 is wrong by float32's eps, however small it is itself.
        eps, exact = (torch.finfo(t).eps for t in (q.dtype, compute_dtype(q.dtype)))
        self.slope_error = exact / eps
        learned = [t for t in variant.tensors if t.requires_grad]
        named = {"out": grad_out, "dq": q, "dk": k, "dv": v}
        named |= {f"d{i}": t for i, t in enumerate(learned)}
        self.magnitude = _Sums(problem, learned, named)
        named |= {"lse": grad_lse, "row_max": grad_lse}
        self.allowed = _Sums(problem, learned, named)
        self.score = 0.0
        self.errors = {} if exp is None or q.dtype.itemsize > 2 else quick_errors(exp)
        score, _ = variant.gradient
        self.wrong = self._moved(variant.graph.score)
        self.wrong_slope = self._moved(score.score)
        moved = tuple((c, at, self._moved(node)) for c, at, node in score.captured)
        self.wrong_captured = attrs.evolve(score, captured=moved)
        for rows in sequences_of(problem, layout):
            self._sequence(rows, q, k, v, grad_out, grad_lse)

    def found(self) -> Sizes:
        return Sizes(self.magnitude.of, self.allowed.of if self._approximates() else {}, self.score)

    def _approximates(self) -> bool:
        return any(node.op in self.errors for node in walk(self.variant.graph.score))

    def _moved(self, value: Node) -> Node:
        """How far a value moves, to first order, if approximated functions are wrong by their
        errors, each with any sign."""
        moved = algebra.const(0.0)
        for node in walk(value):
            if node.op in self.errors:
                wrong = algebra.mul(node, 1.0 + self.errors[node.op])
                (other,) = substitute([value], {node: wrong})
                moved = algebra.add(moved, algebra.absolute(algebra.sub(other, value)))
        return moved

    def _sequence(self, rows: Rows, q, k, v, grad_out, grad_lse) -> None:
        q_h, k_h, v_h, do = (
            by_head(t.double(), self.problem.heads_q)
            for t in (rows.queries(q), rows.keys(k), rows.keys(v), rows.queries(grad_out))
        )
        dlse = rows.queries(grad_lse.transpose(-1, -2)).double().transpose(0, 1)
        raw = (q_h @ k_h.transpose(-1, -2) * self.scale).requires_grad_()
        with torch.enable_grad():
            s = score_matrix(raw, self.variant, rows.b)
            slope = torch.zeros_like(raw)
            if s.modified.requires_grad:
                (found,) = torch.autograd.grad(s.modified.sum(), raw, allow_unused=True)
                slope = slope if found is None else found
        p = torch.where(s.mask, s.p + self.tiny, 0.0)
        row = (do.abs() * (p @ v_h.abs())).sum(-1) + dlse.abs()
        dp = (do @ v_h.transpose(-1, -2)).abs() + row[..., None]
        slope = slope.abs() + self.slope_error
        this = _Sequence(
            rows, q_h.abs(), k_h.abs(), v_h.abs(), do.abs(), raw, s, row, p, dp, p * dp, slope
        )
        self._add(self.magnitude, this, p, this.ds * slope, this.ds, s.p_sink * row)
        products = this.q @ this.k.transpose(-1, -2) * abs(self.scale) + s.modified.abs()
        products = torch.where(s.mask & s.modified.isfinite(), products, 0.0)
        if products.numel():
            self.score = max(self.score, float(products.max()))
            if self._approximates():
                self._approximations(this)

    def _add(
        self, to: _Sums, this: _Sequence, p: Tensor, draw: Tensor, ds: Tensor, sink: Tensor
    ) -> None:
        """Add what is linear in weights, gradients of raw and of modified scores, and of sinks."""
        rows, live = this.rows, this.s.mask
        draw = torch.where(live, draw + self.tiny, 0.0) * abs(self.scale)
        to.queries("out", rows, p @ this.v)
        to.queries("dq", rows, draw @ this.k)
        to.keys("dk", rows, draw.transpose(-1, -2) @ this.q)
        to.keys("dv", rows, p.transpose(-1, -2) @ this.do)
        of_score, of_sink = self.variant.gradient
        to.captured(of_score, rows.b, this.raw, ds)
        to.captured(of_sink, rows.b, torch.zeros_like(sink[..., None]), sink[..., None])

    def _approximations(self, this: _Sequence) -> None:
        """Scores that move by `moved` move everything else by at most what is added here."""
        s, live = this.s, this.s.mask
        variables = indices(this.rows.b, *this.raw.shape)
        variables |= {"score": torch.where(live, this.raw, 0.0)}
        moved, slope_moved = evaluate(
            [self.wrong, self.wrong_slope], variables, dtype=torch.float64, live=live
        )
        moved = _finite(moved.expand(this.raw.shape), live & s.modified.isfinite())
        slope_moved = _finite(slope_moved.expand(this.raw.shape), live)
        row_max = moved.amax(-1)
        lse = torch.minimum(_finite(s.p * moved.expm1(), live).sum(-1), row_max)
        p = _finite(this.p * (moved + lse[..., None]).expm1(), live).clamp(max=1.0)
        row = (this.do * (p @ this.v)).sum(-1)
        ds = p * this.dp + (this.p + p) * row[..., None]
        draw = ds * this.slope + (this.ds + ds) * slope_moved
        sink = s.p_sink * (lse.expm1() * this.row + row)
        self._add(self.allowed, this, p, draw, ds, sink)
        self.allowed.captured(self.wrong_captured, this.rows.b, this.raw, this.ds + ds)
        self.allowed.queries("lse", this.rows, lse)
        self.allowed.queries("row_max", this.rows, row_max)


def _finite(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values.nan_to_num(0.0), 0.0)
