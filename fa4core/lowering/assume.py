"""Score mods where the mask holds: a kernel throws away what they make of other pairs.

Under a causal mask `|q - k|` is `q - k`, which changes evenly from key to key (`affine`). It knows
the graph only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from primitives.expr import Node, algebra, walk
from primitives.expr.rebuild import substitute


def where_attended(mask: Node, roots: Sequence[Node]) -> tuple[Node, ...]:
    """`roots` in forms that have the same values wherever `mask` is true."""
    simpler: dict[Node, Node] = {}
    for holds in _conditions(mask):
        simpler[holds] = algebra.TRUE
        if holds.op == "ge0":
            (x,) = holds.args
            simpler[algebra.absolute(x)] = x
            simpler[algebra.extremum("max", x, 0)] = x
    roots = substitute(roots, {old: new for old, new in simpler.items() if not old.is_const})
    return substitute(roots, {n: _outside(n) for n in walk(*roots) if _is_float_of_abs(n)})


def _conditions(mask: Node) -> Iterator[Node]:
    """All that must be true for the mask to be."""
    if mask.op == "and":
        for part in mask.args:
            yield from _conditions(part)
    else:
        yield mask


def _is_float_of_abs(node: Node) -> bool:
    return node.op == "float" and node.args[0].op == "abs"


def _outside(node: Node) -> Node:
    """`float(|x|)` as `|float(x)|`."""
    return algebra.absolute(algebra.to_float(node.args[0].args[0]))
