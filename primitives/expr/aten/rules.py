"""The table of operator rules, and what rules are made of.

A rule is called as `rule(out, *args, **kwargs)`: arguments are arrays, scatters or plain Python
values as they stand in the traced graph; `out` is the shape and dtype of the operator's result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from primitives.expr import algebra as A
from primitives.expr import arrays
from primitives.expr.arrays import Array, Scatter, Value
from primitives.expr.node import Kind, Node, kind_of


@attrs.frozen
class Result:
    """Shape and dtype of what an operator returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def kind(self) -> Kind:
        return kind_of(self.dtype)


Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def as_array(value: Any) -> Array:
    if isinstance(value, Array | Scatter):
        return arrays.materialise(value)
    return arrays.scalar(A.const(value))


def cast(node: Node, kind: Kind) -> Node:
    return A.cast(node, kind)


def elementwise(out: Result, function: Callable[..., Node], *operands: Any) -> Array:
    kind = out.kind
    return arrays.elementwise(
        lambda *nodes: cast(function(*nodes), kind), kind, [as_array(o) for o in operands]
    )


def promoted(function: Callable[..., Node]) -> Rule:
    """An arithmetic operator: operands take the result's kind first, as torch promotes them."""

    def apply(out: Result, *operands: Any) -> Value:
        return elementwise(out, lambda *n: function(*(cast(x, out.kind) for x in n)), *operands)

    return apply


def plain(function: Callable[..., Node]) -> Rule:
    return lambda out, *operands: elementwise(out, function, *operands)


def as_value(value: Any) -> Value:
    return value if isinstance(value, Array | Scatter) else as_array(value)
