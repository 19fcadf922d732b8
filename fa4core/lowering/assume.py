"""A score mod where a mask is known to hold: what is behind it doesn't count.

Under a causal mask the distance |q - k| is q - k, and a condition that the mask repeats is true. It
knows the graph only.
"""

from __future__ import annotations

from primitives.expr import Node, algebra, substitute, walk


def assuming(mask: Node, score: Node) -> Node:
    """`score` in a form that has its value wherever `mask` holds."""
    conditions = mask.args if mask.op == "and" else (mask,)
    replace = {c: algebra.TRUE for c in conditions if not c.is_const}
    least = [c.args[0] for c in conditions if c.op == "ge0"]  # none of them is negative
    for node in walk(score):
        if node.op == "abs" and node.kind == "int":
            (x,) = node.args
            for value in (x, algebra.neg(x)):
                if any(_at_least(value, known) for known in least):
                    replace[node] = value
    (score,) = substitute([score], replace)
    return score


def _at_least(x: Node, y: Node) -> bool:
    difference = algebra.sub(x, y)
    return difference.is_const and difference.attr >= 0
