"""A node's operation applied to other operands: substitution, and equality by value.

Results are canonical, as `algebra` makes them. Used wherever a graph's variables are replaced
(shifted masks, packed heads), and by the values that hold graphs, for `==`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from primitives.expr import algebra
from primitives.expr.node import Node, captures, walk
from primitives.expr.text import dump


def rebuild(node: Node, args: tuple[Node, ...]) -> Node:
    """The node's operation applied to other operands, in canonical form."""
    op = node.op
    if op == "linear":
        coefficients, constant = node.attr
        total = algebra.const(constant)
        for coefficient, arg in zip(coefficients, args, strict=True):
            total = algebra.add(total, algebra.mul(coefficient, arg))
        return total
    if op == "gather":
        return algebra.gather(node.attr, args)
    if op in algebra.UNARY:
        return algebra.unary(op, *args)
    if op.startswith("bit"):
        return algebra.bitwise(op.removeprefix("bit"), *args)
    if op in ("min", "max"):
        return algebra.extremum(op, *args)
    if op == "mul" and node.kind == "int":
        product = algebra.const(1)
        for arg in args:
            product = algebra.mul(product, arg)
        return product
    if op == "xor":
        result = algebra.FALSE
        for arg in args:
            result = algebra.logical_xor(result, arg)
        return result
    return OPERATIONS[op](*args)


#: Operations of a fixed number of operands, by name.
OPERATIONS: dict[str, Callable[..., Node]] = {
    "add": algebra.add,
    "sub": algebra.sub,
    "neg": algebra.neg,
    "mul": algebra.mul,
    "div": algebra.div,
    "floordiv": algebra.floordiv,
    "mod": algebra.mod,
    "abs": algebra.absolute,
    "pow": algebra.power,
    "atan2": lambda a, b: Node("atan2", (algebra.to_float(a), algebra.to_float(b)), "float"),
    "float": algebra.to_float,
    "int": algebra.to_int,
    "ge0": lambda a: algebra.less_equal(0, a),
    "eq0": lambda a: algebra.equal(a, 0),
    "le": algebra.less_equal,
    "lt": algebra.less,
    "eq": algebra.equal,
    "not": algebra.logical_not,
    "and": algebra.logical_and,
    "or": algebra.logical_or,
    "where": algebra.where,
}


def substitute(roots: Iterable[Node], replace: dict[Node, Node]) -> tuple[Node, ...]:
    """`roots` with every node in `replace` exchanged, rebuilt in canonical form."""
    roots = tuple(roots)
    done = dict(replace)
    for node in walk(*roots):
        if node not in done:
            args = tuple(done[a] for a in node.args)
            done[node] = node if args == node.args else rebuild(node, args)
    return tuple(done[r] for r in roots)


def fingerprint(root: Node) -> tuple:
    """What tells two functions apart: the graph with the values of its scalars, and its tensors."""
    held = captures(root)
    scalars = {c: c.tensor.item() for c in held if c.is_scalar and c.tensor is not None}
    try:
        constants = {algebra.gather(c): algebra.const(value) for c, value in scalars.items()}
        (root,) = substitute([root], constants)
    except ZeroDivisionError:  # an error when it is computed; here one value among others
        return dump([root]), tuple(scalars.get(c, id(c.tensor)) for c in held)
    return dump([root]), tuple(id(c.tensor) for c in captures(root))
