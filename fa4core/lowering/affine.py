"""Parts of a score mod that are straight lines in the score and in the key: two FMAs an element.

In integers first and converted then, a bias such as ALiBi's takes five instructions. A node that is
`a * score + b * k + c`, with a, b and c the same for the whole row, is evaluated once, at the
row's first key, and goes on from there. It knows the graph only; `cute` emits it.
"""

from __future__ import annotations

import attrs

from fa4core.lowering.words import per_element
from primitives.expr import Node, algebra

ZERO, ONE, MINUS_ONE = (algebra.const(x) for x in (0.0, 1.0, -1.0))


@attrs.frozen
class Line:
    """score * `factor` + k * `slope` + what `bias` is at k = 0.

    Attributes:
        factor, slope: The same for the whole row; the constant 0.0 if the line has no such part.
        bias: The node without its part in the score; it still depends on k if the slope is not 0.
    """

    factor: Node
    slope: Node
    bias: Node

    def __add__(self, other: Line) -> Line:
        return Line(*map(algebra.add, attrs.astuple(self), attrs.astuple(other)))

    def __mul__(self, factor: Node) -> Line:
        return Line(*(_product(part, factor) for part in attrs.astuple(self)))


def line(node: Node) -> Line | None:
    """A float node as a line, if it is one."""
    if not per_element(node):
        return Line(ZERO, ZERO, node)
    if node is algebra.var("score"):
        return Line(ONE, ZERO, ZERO)
    if node.op == "float":
        slope = _slope(node.args[0])
        return None if slope is None else Line(ZERO, algebra.const(float(slope)), node)
    if node.op in ("add", "sub"):
        first, second = map(line, node.args)
        if first is None or second is None:
            return None
        return first + (second if node.op == "add" else second * MINUS_ONE)
    if node.op == "neg":
        return _scaled(node.args[0], MINUS_ONE)
    if node.op == "div" and not per_element(node.args[1]):
        return _scaled(node.args[0], algebra.div(1.0, node.args[1]))
    if node.op == "mul":
        constant, moving = sorted(node.args, key=per_element)
        return None if per_element(constant) else _scaled(moving, constant)
    return None


def _scaled(node: Node, factor: Node) -> Line | None:
    found = line(node)
    return None if found is None else found * factor


def _slope(node: Node) -> int | None:
    """By how much an integer node grows with the key, if that is the same for all keys."""
    if node is algebra.var("k"):
        return 1
    if node.op != "linear":
        return None
    terms = dict(zip(node.args, node.attr[0], strict=True))
    moving = [t for t in terms if per_element(t)]
    return terms[moving[0]] if moving == [algebra.var("k")] else None


def _product(part: Node, factor: Node) -> Node:
    return part if part is ZERO else algebra.mul(part, factor)
