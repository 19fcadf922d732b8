"""What torch's `make_fx` recorded, turned into arrays of nodes.

`translate` walks the recorded graph once and applies the rule of `aten` for each operator. It
refuses what a graph cannot hold exactly: unknown operators, integers that could wrap around,
roundings narrower than float32, writes into what others see. `trace` is the only user.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import fx

from primitives.expr import algebra as A
from primitives.expr import arrays
from primitives.expr.aten import RULES, Result
from primitives.expr.errors import Refusal
from primitives.expr.node import Capture, kind_of

_NARROW = (torch.int8, torch.int16, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_MAY_WRAP = {"add", "sub", "rsub", "mul", "neg", "abs", "pow", "bitwise_left_shift", "__lshift__"}
_MAY_WRAP |= {"bitwise_not", "prod", "square"}
_FLOAT8 = tuple(
    getattr(torch, name) for name in dir(torch) if name.startswith(("float8_", "float4_"))
)


def translate(module: fx.GraphModule, names: Sequence[str], outside: Container[int]) -> list[Any]:
    """The outputs of a recorded graph whose inputs are the variables `names`.

    `outside` has the ids of tensors that the function captured; a 0-d constant that is none of them
    was made of a number inside the function.

    Returns:
        An `Array` or `Scatter` for each output, or None where the graph returns None.
    """
    return _Translation(module, names, outside).run()


class _Translation:
    def __init__(
        self, module: fx.GraphModule, names: Sequence[str], outside: Container[int]
    ) -> None:
        self.module, self.outside = module, outside
        self.values: dict[fx.Node, Any] = {}
        self.names = iter(names)
        #: Values that a view of exists, or that are captured: writing into them is refused.
        self.shared: set[fx.Node] = set()

    def run(self) -> list[Any]:
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = arrays.scalar(A.var(next(self.names)))
            elif node.op == "get_attr":
                self.values[node] = self._captured(node)
                self.shared.add(node)
            elif node.op == "output":
                return [self.values[a] if isinstance(a, fx.Node) else a for a in node.args[0]]
            else:
                try:
                    self.values[node] = self._operator(node)
                except (Refusal, ArithmeticError) as error:
                    refusal = error if isinstance(error, Refusal) else Refusal(str(error))
                    refusal.place = node.meta.get("custom", {}).get("place")
                    raise refusal from error
        raise AssertionError("a recorded graph has an output")

    def _captured(self, node: fx.Node) -> arrays.Value:
        tensor = getattr(self.module, str(node.target))
        if tensor.dim() == 0 and id(tensor) not in self.outside:
            return arrays.scalar(A.const(tensor.item()))  # a number written inside the function
        return arrays.captured(Capture(tensor), tensor.shape)

    def _operator(self, node: fx.Node) -> Any:
        name = _name(node.target)
        result = node.meta.get("val")
        mutable = is_mutable(node.target)
        rule = RULES.get(name.removesuffix("_") if mutable else name)
        args: Any = fx.map_arg(node.args, self.values.__getitem__)
        kwargs: Any = fx.map_arg(dict(node.kwargs), self.values.__getitem__)
        if node.target is operator.getitem:
            return args[0][args[1]]
        first = result[0] if isinstance(result, list | tuple) and result else result
        if rule is None or not isinstance(first, torch.Tensor):
            raise Refusal(_unsupported(node.target))
        _refuse_rounding(name.removesuffix("_"), node, first.dtype)
        self._note_views(node)
        produced = rule(Result(tuple(first.shape), first.dtype), *args, **kwargs)
        return self._written(node, produced) if mutable else produced

    def _note_views(self, node: fx.Node) -> None:
        schema = getattr(node.target, "_schema", None)
        alias = schema.returns[0].alias_info if schema and schema.returns else None
        if alias is not None and not alias.is_write and isinstance(node.args[0], fx.Node):
            self.shared |= {node, node.args[0]}

    def _written(self, node: fx.Node, produced: arrays.Value) -> arrays.Value:
        """An in-place operator: later uses see its result, if nobody else sees its target."""
        target = node.args[0]
        assert isinstance(target, fx.Node)
        if target.op == "get_attr":
            raise Refusal(
                "writes into a captured tensor; a mask or score function computes one value and "
                "changes nothing"
            )
        if target in self.shared:
            raise Refusal(
                "writes in place into a tensor that others are views of; write `x = x + y` instead"
            )
        cast = arrays.cast(produced, kind_of(node.meta["val"].dtype))
        self.values[target] = cast
        return cast


def _refuse_rounding(name: str, node: fx.Node, dtype: torch.dtype) -> None:
    """Integers are exact and floats are float32 in a graph: refuse what relies on less."""
    short = name.rpartition(".")[2]
    if dtype in _NARROW and (short in _MAY_WRAP or (short == "_to_copy" and _wider(node.args[0]))):
        raise Refusal(
            f"{short} to {dtype} could wrap around; stay with .int() or .long()"
            if short == "_to_copy"
            else f"{short} on {dtype} could wrap around; convert with .int() or .long() first"
        )
    if dtype in _FLOAT8 and short == "_to_copy":
        raise Refusal(
            f"a cast to {dtype} rounds, and scores are computed in float32; round before the call, "
            "and capture the result"
        )


def _wider(argument: object) -> bool:
    tensor = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return isinstance(tensor, torch.Tensor) and tensor.dtype not in (torch.bool, torch.int8)


_VARYING = {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive"}
_VARYING |= {"repeat_interleave", "bincount", "argwhere", "_local_scalar_dense"}


def has_rule(op: Any) -> bool:
    """Whether the graph can hold this operator as it is."""
    return _name(op) in RULES


def is_mutable(op: Any) -> bool:
    """Whether the operator writes into an argument."""
    return bool(getattr(getattr(op, "_schema", None), "is_mutable", False))


def varies(op: Any) -> bool:
    """Whether the result is random, or its shape depends on values."""
    random = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
    return random or _name(op).rpartition(".")[2] in _VARYING


def _name(op: Any) -> str:
    return str(getattr(op, "overloadpacket", op))


def _unsupported(op: Any) -> str:
    if torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()):
        return (
            f"{op} draws random numbers, which would differ in every pass; use mask.random, "
            "or draw them before and capture the tensor"
        )
    if varies(op):
        return (
            f"the shape of the result of {op} depends on values; compute it before, and "
            "capture the tensor, or use torch.where"
        )
    return (
        f"operator {op} is not one a mask or score function can use; write it with index "
        "and float arithmetic, comparisons, torch.where, or captured tables"
    )
