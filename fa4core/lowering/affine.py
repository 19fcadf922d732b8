"""Numbers that change evenly from key to key, like the bias of ALiBi.

Such a number is start + distance * change, where start and change are the same for the elements of
a row that a thread works on: one multiply-add, where converting each key to a float would take a
unit with a sixteenth of that rate. It knows the graph only; `cute` emits it.
"""

from __future__ import annotations

import functools

from fa4core.lowering.words import per_element
from primitives.expr import Node, algebra


@functools.lru_cache(maxsize=4096)
def change(node: Node) -> Node | None:
    """What a number grows by from key to key, the same for the whole row; None if it varies."""
    if not per_element(node):
        return algebra.const(0 if node.kind == "int" else 0.0)
    if node is algebra.var("k"):
        return algebra.const(1)
    if node.op == "linear":
        return _sum([_times(c, change(a)) for a, c in zip(node.args, node.attr[0], strict=True)])
    if node.op == "float" and node.args[0].kind == "int":
        inner = change(node.args[0])
        return None if inner is None else algebra.to_float(inner)
    if node.kind != "float":
        return None
    if node.op == "add":
        return _sum([change(a) for a in node.args])
    if node.op == "sub":
        return _sum([change(node.args[0]), _times(-1.0, change(node.args[1]))])
    if node.op == "neg":
        return _times(-1.0, change(node.args[0]))
    if node.op == "mul":
        return _of_product(node.args)
    if node.op == "div" and not per_element(node.args[1]):
        inner = change(node.args[0])
        return None if inner is None else algebra.div(inner, node.args[1])
    return None


def _sum(parts: list[Node | None]) -> Node | None:
    if any(part is None for part in parts):
        return None
    return functools.reduce(algebra.add, parts)  # type: ignore[arg-type]


def _times(factor: float, part: Node | None) -> Node | None:
    return None if part is None else algebra.mul(part, factor)


def _of_product(factors: tuple[Node, ...]) -> Node | None:
    moving = [f for f in factors if per_element(f)]
    inner = change(moving[0]) if len(moving) == 1 else None
    if inner is None:
        return None
    return functools.reduce(algebra.mul, (f for f in factors if f is not moving[0]), inner)


def change_of(node: Node) -> Node:
    """The change of a number that is known to change evenly."""
    found = change(node)
    assert found is not None, node
    return found


def even(root: Node) -> list[Node]:
    """The largest parts of a node that are such numbers."""
    if not per_element(root) or root.op == "var":
        return []
    if root.kind == "float" and change(root) is not None:
        return [root]
    return list(dict.fromkeys(node for arg in root.args for node in even(arg)))
