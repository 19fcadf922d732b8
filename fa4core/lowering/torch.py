"""Expression graph -> torch: evaluate nodes on tensors of indices and scores.

Every value broadcasts: variables come in shapes that broadcast to the block being evaluated, and a
node that depends on few of them stays as small as they are. Integers are int64, floats one dtype.
Knows the graph and torch only; the reference backend, the testing kit and the exact part of the
tile analysis use it. All of it is differentiable by torch autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fa4core.lowering.outside import outside
from primitives.expr import Capture, Node, walk

Tensor = torch.Tensor


def evaluate(
    roots: Sequence[Node],
    variables: Mapping[str, Tensor],
    tensors: Mapping[Capture, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    live: Tensor | None = None,
) -> list[Tensor]:
    """The values of `roots`.

    Args:
        roots: Nodes to evaluate together; what they share is computed once.
        variables: A tensor for each variable the roots use (`primitives.expr.VARIABLES`), in
            shapes that broadcast together. Indices and lengths are integers.
        tensors: The tensor of each capture; None takes the ones that were captured.
        dtype: Of all floats, captured ones included.
        live: bool, broadcastable with the variables: captured tensors may be indexed outside
            where it is false (they read as their first element there). None: nowhere.

    Returns:
        One tensor for each root: bool, int64 or `dtype`, broadcastable with the variables.

    Raises:
        IndexError: A captured tensor is indexed outside, saying which, where and by how much.
            Negative indices count from the end, as in torch.
        ZeroDivisionError: Integer `//` or `%` by zero.
    """
    device = next((t.device for t in variables.values()), torch.device("cpu"))
    values: dict[Node, Tensor] = {}
    for node in walk(*roots):
        if node.op == "const":
            kind = {"bool": torch.bool, "int": torch.int64, "float": dtype}[node.kind]
            values[node] = torch.tensor(node.attr, dtype=kind, device=device)
        elif node.op == "var":
            values[node] = variables[node.attr].to(dtype if node.kind == "float" else torch.int64)
        elif node.op == "gather":
            tensor = node.attr.tensor if tensors is None else tensors[node.attr]
            values[node] = _gather(node, tensor, [values[a] for a in node.args], dtype, live)
        elif node.op == "linear":
            values[node] = _linear(node, [values[a] for a in node.args])
        elif node.op == "float":
            values[node] = values[node.args[0]].to(dtype)
        else:
            values[node] = _operation(node, [values[a] for a in node.args])
    return [values[r] for r in roots]


def _operation(node: Node, args: list[Tensor]) -> Tensor:
    if node.op in ("floordiv", "mod") and bool((args[1] == 0).any()) and node.kind == "int":
        raise ZeroDivisionError(
            f"{node} divides an integer by zero; keep the divisor away from zero "
            "(for instance with `.clamp(min=1)`)"
        )
    return (_OPERATIONS.get(node.op) or _by_name(node.op))(*args)


def _by_name(op: str) -> Callable[..., Tensor]:
    """Functions of one float argument, and the plain arithmetic, have torch's own names."""
    function = getattr(torch, op, None)
    if function is None:
        raise NotImplementedError(f"operation {op!r} has no torch form")
    return function


def _reduce(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def apply(first: Tensor, *rest: Tensor) -> Tensor:
        for value in rest:
            first = function(first, value)
        return first

    return apply


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "mul": _reduce(torch.mul),
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "min": _reduce(torch.minimum),
    "max": _reduce(torch.maximum),
    "bitand": torch.bitwise_and,
    "bitor": torch.bitwise_or,
    "bitxor": torch.bitwise_xor,
    "bitshl": torch.bitwise_left_shift,
    "bitshr": torch.bitwise_right_shift,
    "int": lambda a: a.to(torch.int64),
    "ge0": lambda a: a >= 0,
    "eq0": lambda a: a == 0,
    "le": torch.le,
    "lt": torch.lt,
    "eq": torch.eq,
    "not": torch.logical_not,
    "and": _reduce(torch.logical_and),
    "or": _reduce(torch.logical_or),
    "xor": _reduce(torch.logical_xor),
}


def _linear(node: Node, args: list[Tensor]) -> Tensor:
    coefficients, constant = node.attr
    total: Tensor | None = None
    for coefficient, arg in zip(coefficients, args, strict=True):
        if total is None:
            total = (arg if coefficient == 1 else arg * coefficient) + constant
        else:
            total = torch.add(total, arg, alpha=coefficient)
    assert total is not None
    return total


def _gather(
    node: Node,
    tensor: Tensor | None,
    indices: list[Tensor],
    dtype: torch.dtype,
    live: Tensor | None,
) -> Tensor:
    if tensor is None:
        raise ValueError(f"{node.attr} is a placeholder; pass its tensor in `tensors`")
    kind = {"bool": torch.bool, "int": torch.int64, "float": dtype}[node.kind]
    inside = [_inside(node, tensor, dim, i, live) for dim, i in enumerate(indices)]
    if tensor.numel() == 0:  # nothing live reads it, or `_inside` had raised
        shape = torch.broadcast_shapes(*(i.shape for i in indices))
        return torch.zeros(shape, dtype=kind, device=tensor.device)
    safe = [
        i if good is None else torch.where(good, i, 0)
        for i, good in zip(indices, inside, strict=True)
    ]
    return tensor[tuple(i.to(tensor.device) for i in safe)].to(kind)


def _inside(
    node: Node, tensor: Tensor, dim: int, index: Tensor, live: Tensor | None
) -> Tensor | None:
    """Which indices are inside, None if all; raises if one that is live is not."""
    size = tensor.shape[dim]
    if index.numel() == 0:
        return None
    low, high = (int(x) for x in torch.aminmax(index))
    if -size <= low and high < size:
        return None
    inside = (index >= -size) & (index < size)
    wrong = ~inside if live is None else ~inside & live
    if bool(wrong.any()):
        values = index.expand(torch.broadcast_shapes(index.shape, wrong.shape))
        values = values[wrong.expand(values.shape)]
        raise outside(node, dim, int(values.min()), int(values.max()))
    return inside
