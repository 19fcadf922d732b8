"""A second, tiny evaluator of expression graphs, for tests of tracing and of canonical form.

It follows the meaning of each operation in the plainest way (int64, float64, whole arrays), and
shares no code with the lowerings.
"""

from __future__ import annotations

import itertools
import operator
from functools import reduce

import torch

from primitives.expr import Node, walk

_UNARY = {
    name: getattr(torch, name)
    for name in (
        *("exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "sin", "cos", "tan", "asin"),
        *("acos", "atan", "sinh", "cosh", "sqrt", "rsqrt", "sigmoid", "erf", "erfc", "floor"),
        *("ceil", "trunc", "round", "sign", "abs", "neg"),
    )
}
_BINARY = {
    "sub": operator.sub,
    "div": lambda a, b: a / b,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "mod": torch.remainder,
    "pow": torch.pow,
    "atan2": torch.atan2,
    "le": operator.le,
    "lt": operator.lt,
    "eq": operator.eq,
    "bitshl": operator.lshift,
    "bitshr": operator.rshift,
}
_MANY = {
    "add": operator.add,
    "mul": operator.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "bitand": operator.and_,
    "bitor": operator.or_,
    "bitxor": operator.xor,
}
DTYPES = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}


def evaluate(root: Node, values: dict[str, torch.Tensor]) -> torch.Tensor:
    """The value of a node for arrays of its variables, which broadcast."""
    done: dict[Node, torch.Tensor] = {}
    for node in walk(root):
        done[node] = _apply(node, [done[a] for a in node.args], values)
    return done[root]


def _apply(node: Node, args: list, values: dict[str, torch.Tensor]) -> torch.Tensor:
    op = node.op
    if op == "const":
        return torch.tensor(node.attr, dtype=DTYPES[node.kind])
    if op == "var":
        return values[node.attr]
    if op == "gather":
        table = node.attr.tensor.detach()
        return (table[tuple(args)] if args else table).to(DTYPES[node.kind])
    if op == "linear":
        coefficients, constant = node.attr
        return sum((c * a for c, a in zip(coefficients, args, strict=True)), torch.tensor(constant))
    if op == "ge0":
        return args[0] >= 0
    if op == "eq0":
        return args[0] == 0
    if op == "not":
        return ~args[0]
    if op in ("int", "float"):
        return args[0].to(DTYPES[op])
    if op == "where":
        return torch.where(*args)
    if op in _UNARY:
        return _UNARY[op](args[0])
    if op in _BINARY:
        return _BINARY[op](*args)
    return reduce(_MANY[op], args)


def grid(
    seqlen_q: int, seqlen_k: int | None = None, batch: int = 1, heads: int = 1
) -> dict[str, torch.Tensor]:
    """Every index of a problem: arrays that broadcast to (batch, heads, seqlen_q, seqlen_k)."""
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    return {
        "b": torch.arange(batch)[:, None, None, None],
        "h": torch.arange(heads)[None, :, None, None],
        "q": torch.arange(seqlen_q)[None, None, :, None],
        "k": torch.arange(seqlen_k)[None, None, None, :],
        "seqlen_q": torch.tensor(seqlen_q),
        "seqlen_k": torch.tensor(seqlen_k),
    }


def table(node: Node, seqlen_q: int, seqlen_k: int | None = None, batch: int = 1, heads: int = 1):
    """The node's value at every index, (batch, heads, seqlen_q, seqlen_k)."""
    indices = grid(seqlen_q, seqlen_k, batch, heads)
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    return evaluate(node, indices).broadcast_to(batch, heads, seqlen_q, seqlen_k)


def by_python(function, seqlen_q: int, seqlen_k: int, batch: int = 1, heads: int = 1):
    """A mask table from a plain Python rule of numbers, element by element."""
    out = torch.zeros(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool)
    for index in itertools.product(*map(range, out.shape)):
        out[index] = bool(function(*index))
    return out
