"""`ScoreMod`: a function of (score, b, h, q_idx, kv_idx) as a value, with its derivative."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from primitives.expr import Capture, Node, algebra, captures, dump, fingerprint, pretty, substitute
from primitives.expr.errors import name_of
from primitives.expr.reuse import trace_prebuilt_with_derivative
from primitives.expr.trace import Derivative, GradientRule, trace_with_derivative

VARIABLES = ("score", "b", "h", "q", "k")

ScoreFunction = Callable[..., torch.Tensor]


@attrs.frozen(eq=False, repr=False)
class ScoreMod:
    """What happens to a score `scale * (q . k)` before the softmax.

    `a >> b` applies `a` first, then `b`. Equality and `key` are as for `Mask`.

    `gradient()` holds the derivatives with respect to the incoming score and to every element of
    a captured tensor that requires grad, from the same trace.
    """

    expr: Node
    _gradient: Callable[[], Derivative] = attrs.field(alias="gradient_rule")
    name: str = "score"
    _parts: tuple[ScoreMod, ...] = ()

    @property
    def parts(self) -> tuple[ScoreMod, ...]:
        """The score mods that `>>` composed this one of, in order; itself if it is no chain."""
        return self._parts or (self,)

    def gradient(self) -> Derivative:
        """d value / d score, and for captured tensors (capture, indices, d value / d element)."""
        return self._gradient()

    def __rshift__(self, other: ScoreMod) -> ScoreMod:
        if not isinstance(other, ScoreMod):
            hint = " Wrap a function with score.define." if callable(other) else ""
            raise TypeError(f">> composes two score mods; got {type(other).__name__}.{hint}")
        (expr,) = substitute([other.expr], {algebra.var("score"): self.expr})
        name = f"{self.name} >> {other.name}"
        return ScoreMod(expr, _ChainRule(self, other), name, self.parts + other.parts)

    @property
    def key(self) -> str:
        """Canonical text: equal for score mods that share a kernel."""
        return dump([self.expr])

    @property
    def captures(self) -> tuple[Capture, ...]:
        return captures(self.expr)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The captured tensors and scalars, in the order of the key's slots."""
        return tuple(c.tensor for c in self.captures if c.tensor is not None)

    def _identity(self) -> tuple:
        return self.key, fingerprint(self.expr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScoreMod) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __bool__(self) -> bool:
        raise TypeError("a score mod has no truth value; compose score mods with `>>`")

    def __repr__(self) -> str:
        return f"ScoreMod({self.name}: {pretty(self.expr)})"


@attrs.frozen(eq=False)
class _ChainRule:
    """The derivative of `first >> second`, made when it is asked for."""

    first: ScoreMod
    second: ScoreMod

    def __call__(self) -> Derivative:
        first, second = self.first.gradient(), self.second.gradient()
        outer, *rest = substitute(
            [second.score, *(n for _, ids, d in second.captured for n in (*ids, d))],
            {algebra.var("score"): self.first.expr},
        )
        rows, nodes = [], iter(rest)
        for capture, indices, _ in second.captured:
            rows.append((capture, tuple(next(nodes) for _ in indices), next(nodes)))
        inner = [(c, i, algebra.mul(outer, d)) for c, i, d in first.captured]
        return Derivative(algebra.mul(outer, first.score), (*inner, *rows), first.wrt | second.wrt)


def identity() -> ScoreMod:
    """The score as it is."""
    return ScoreMod(algebra.var("score"), GradientRule(Derivative(algebra.const(1.0))), "identity")


def define(function: ScoreFunction) -> ScoreMod:
    """Make a score mod of a plain Python function; FlexAttention's `score_mod`s work unchanged.

    Args:
        function: `function(score, b, h, q_idx, kv_idx) -> score`. `score` is a 0-d float tensor,
            already scaled. It may close over tensors: those that require grad receive gradients.
            It may ask for keyword-only `seqlen_q` and `seqlen_k`.

    Raises:
        DefinitionError: The function can't be traced or differentiated, has another signature, or
            returns something that is not a score.
    """
    if isinstance(function, ScoreMod):
        return function
    expr, rule = trace_with_derivative(function, VARIABLES, "score")
    return ScoreMod(expr, rule, name_of(function))


def named(name: str, function: ScoreFunction) -> ScoreMod:
    """A prebuilt score mod: `define` with a name, tracing once for all run-time values."""
    return ScoreMod(*trace_prebuilt_with_derivative(function, VARIABLES, "score"), name)
