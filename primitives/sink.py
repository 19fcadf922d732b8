"""Sinks: one more logit in the softmax's denominator that no value belongs to.

A sink is a function of (b, h, q_idx) in general, a learned logit per head in practice (gpt-oss).
It is orthogonal to masks and score mods: it is not scaled, not masked and not modified.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from primitives.expr import Node, dump, pretty
from primitives.expr.errors import name_of
from primitives.expr.trace import Derivative, trace_with_derivative
from primitives.scalar import as_float, parameter

VARIABLES = ("b", "h", "q")


@attrs.frozen(eq=False, repr=False)
class Sink:
    """The logit `s` that joins a row's softmax: O = sum(e^x v) / (e^s + sum e^x).

    The LSE of a row includes its sink, so a row with nothing to attend to has O = 0 and LSE = s.
    """

    expr: Node
    _gradient: Callable[[], Derivative] = attrs.field(alias="gradient_rule")
    name: str = "sink"

    def gradient(self) -> Derivative:
        """d logit / d element for captured tensors that require grad."""
        return self._gradient()

    @property
    def key(self) -> str:
        return dump([self.expr])

    def __repr__(self) -> str:
        return f"Sink({self.name}: {pretty(self.expr)})"


def define(function: Callable[..., torch.Tensor]) -> Sink:
    """A sink from a plain Python function.

    Args:
        function: `function(b, h, q_idx) -> logit`, a 0-d float tensor. It may close over tensors:
            those that require grad receive gradients.

    Raises:
        DefinitionError: The function can't be traced or returns something that is not a logit.
    """
    expr, rule = trace_with_derivative(function, VARIABLES, "sink")
    return Sink(expr, rule, name_of(function))


def learned(logits: torch.Tensor) -> Sink:
    """One logit per query head, as in gpt-oss.

    Args:
        logits: (heads_q,), floating point; receives a gradient if it requires one.

    Raises:
        TypeError: Another dtype or shape.
    """
    if not isinstance(logits, torch.Tensor) or logits.dim() != 1:
        shape = tuple(getattr(logits, "shape", ()))
        raise TypeError(f"logits has shape {shape}; (heads_q,) is accepted")
    if not logits.dtype.is_floating_point:
        raise TypeError(f"logits is {logits.dtype}; a floating-point tensor is accepted")
    sink = define(lambda b, h, q_idx: logits[h])
    return attrs.evolve(sink, name="learned")


def constant(logit: float = 0.0) -> Sink:
    """The same logit everywhere; 0 gives "softmax plus one". A new value compiles nothing.

    Args:
        logit: A number; minus infinity is no sink.
    """
    value = parameter(as_float(logit, "logit"))
    return attrs.evolve(define(lambda b, h, q_idx: value), name=f"constant({logit})")
