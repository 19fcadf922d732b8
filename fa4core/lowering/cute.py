"""Expression graph -> CuTe DSL: scalar code for one (query, key) pair at a time.

Indices are int32, floats float32. A node that depends on neither the key nor the score is emitted
once for a row, whichever element asks first; the rest is emitted for every element. Captured
tensors are arguments of the kernel. It knows the graph and the DSL; kernels' softmax and
correction roles use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute import math as device

from fa4core.lowering import affine
from fa4core.lowering.approximate import QUICK, Unit
from fa4core.lowering.words import per_element
from primitives.expr import Capture, Node, algebra, walk

Value = Any  # Int32, Float32, Boolean of the DSL, or a Python number known when compiling


class Scope:
    """Values of nodes, computed on demand.

    Args:
        variables: Values of the variables that are the same in the whole scope.
        captured: The tensor of each capture, in global memory.
        outer: The scope of the row that this element's scope belongs to.
        unit: Who computes transcendental functions, approximately; None: as exact as float32 is.
        start: The scope of an element of the row before this one, for numbers that change evenly.
        distance: How many elements before.
    """

    def __init__(
        self,
        variables: Mapping[str, Value],
        captured: Mapping[Capture, cute.Tensor],
        outer: Scope | None = None,
        unit: Unit | None = None,
        start: Scope | None = None,
        distance: int = 0,
    ):
        self.variables, self.captured = variables, captured
        self.outer, self.unit = outer, unit
        self.start, self.distance = start, distance
        self.values: dict[Node, Value] = {}

    def element(self, k: Value) -> Scope:
        """The scope of one element of this row, for its mask."""
        return Scope({"k": k}, self.captured, self)

    def behind(self, distance: int, score: Value, unit: Unit) -> Scope:
        """The scope of an element `distance` behind this one, for its score mod."""
        k = self.variables["k"] + distance
        return Scope({"k": k, "score": score}, self.captured, self.outer, unit, self, distance)

    def hoist(self, roots: Sequence[Node]) -> None:
        """Emit what `roots` need once for a row, here: before code that branches."""
        for node in walk(*roots):
            if not per_element(node) and node.op != "const":
                self.value(node)

    def first(self, k: Value, roots: Sequence[Node]) -> Scope:
        """The scope of the row's first element, with what others get from it emitted here."""
        first = self.element(k)
        for node in (node for root in roots for node in affine.even(root)):
            first.value(node)
            self.value(affine.change_of(node))
        return first

    def value(self, node: Node) -> Value:
        """The value of a node."""
        if self.outer is not None and not per_element(node):
            return self.outer.value(node)
        if node not in self.values:
            self.values[node] = self._emit(node)
        return self.values[node]

    def _emit(self, node: Node) -> Value:
        if node.op == "const":
            return node.attr
        if node.op == "var":
            return self.variables[node.attr]
        if self.start is not None and node.kind == "float":
            by = affine.change(node)
            if by is not None:
                start, by = self.start.value(node), self.value(by)
                if isinstance(start, float) and start == 0.0:
                    return by * float(self.distance)
                start = as_float(start)
                return start + by * float(self.distance) if self.distance else start
        if node.op == "gather":
            return _gather(self.captured[node.attr], node, self._args(node))
        if node.op == "linear":
            coefficients, constant = node.attr
            return _linear(coefficients, constant, self._args(node))
        if self.unit is not None and node.op in QUICK:
            return QUICK[node.op](as_float(self.value(node.args[0])), self.unit)
        if self.unit is not None and node.op == "div" and not per_element(node.args[1]):
            inverse = self.value(algebra.div(1.0, node.args[1]))  # once for a row
            return as_float(self.value(node.args[0])) * as_float(inverse)
        if node.op not in _OPERATIONS:
            raise NotImplementedError(f"operation {node.op!r} has no CuTe DSL form")
        return _OPERATIONS[node.op](node, *self._args(node))

    def _args(self, node: Node) -> list[Value]:
        return [self.value(a) for a in node.args]


# ------------------------------------------------------------------------------------ values


def as_float(x: Value) -> cutlass.Float32:
    return cutlass.Float32(x)


def as_int(x: Value) -> cutlass.Int32:
    return cutlass.Int32(x)


def as_bool(x: Value) -> cutlass.Boolean:
    return cutlass.Boolean(x)


def select(condition: Value, a: Value, b: Value, kind: str) -> Value:
    """`a if condition else b`, without a branch."""
    if isinstance(condition, bool):
        return a if condition else b
    cast = {"float": as_float, "int": as_int, "bool": as_bool}[kind]
    return cast(cutlass.select_(condition, cast(a), cast(b)))


def inside(index: Any, extent: Any) -> Any:
    """An index, or the last one if it lies behind."""
    return select(index < extent, index, extent - 1, "int")


def place_in(tensor: cute.Tensor, indices: Sequence[Value]) -> tuple[Value, ...]:
    """Where indices, of which negative ones count from the end, point; a scalar has one element.

    Always inside: where the mask is false an index may be anything, and memory that is not the
    tensor's is never touched, whatever a variant asks for.

    Args:
        tensor: In global memory.
        indices: As in the graph.
    """
    place = []
    for axis, index in enumerate(indices):
        size = as_int(tensor.shape[axis])
        at = as_int(index)
        at = select(at < 0, at + size, at, "int")
        at = select(at < 0, 0, at, "int")
        at = select(at < size, at, size - 1, "int")
        place.append(at)
    return tuple(place) or (0,)


def _gather(tensor: cute.Tensor, node: Node, indices: list[Value]) -> Value:
    value = tensor[place_in(tensor, indices)]
    if node.kind == "bool":
        return as_int(value) != 0
    return as_float(value) if node.kind == "float" else as_int(value)


def _linear(coefficients: Sequence[int], constant: int, args: Sequence[Value]) -> Value:
    total: Value = None
    for coefficient, arg in zip(coefficients, args, strict=True):
        term = arg if coefficient == 1 else arg * coefficient
        total = term if total is None else total + term
    return total + constant if constant else total


def _fold(function: Callable[[Value, Value], Value]) -> Callable[..., Value]:
    def apply(_: Node, first: Value, *rest: Value) -> Value:
        for value in rest:
            first = function(first, value)
        return first

    return apply


def _numeric(floats: Callable[..., Value], ints: Callable[..., Value]) -> Callable[..., Value]:
    """An operation by the kind of its result."""

    def apply(node: Node, *args: Value) -> Value:
        if node.kind == "float":
            return floats(*(as_float(a) for a in args))
        return ints(*args)

    return apply


def _compare(function: Callable[[Value, Value], Value]) -> Callable[..., Value]:
    def apply(node: Node, a: Value, b: Value) -> Value:
        if "float" in (node.args[0].kind, node.args[1].kind):
            return function(as_float(a), as_float(b))
        return function(as_int(a), as_int(b))

    return apply


def _unary(function: Callable[[Value], Value]) -> Callable[..., Value]:
    return lambda node, a: function(as_float(a))


def _logical(function: Callable[[Value, Value], Value]) -> Callable[..., Value]:
    return _fold(lambda a, b: function(as_bool(a), as_bool(b)))


def _floor_div(a: Value, b: Value) -> Value:
    return as_int(a) // as_int(b)


def _modulo(a: Value, b: Value) -> Value:
    # the DSL's % truncates; the graph's has the sign of the divisor
    return as_int(a) - _floor_div(a, b) * as_int(b)


def _float_modulo(a: Value, b: Value) -> Value:
    remainder = a % b  # with the sign of a
    wrong = (remainder != 0.0) & ((remainder < 0.0) ^ (b < 0.0))
    return select(wrong, remainder + b, remainder, "float")


def _least(a: Value, b: Value) -> Value:
    return select(as_int(a) < as_int(b), a, b, "int")


def _most(a: Value, b: Value) -> Value:
    return select(as_int(a) < as_int(b), b, a, "int")


def _int_abs(a: Value) -> Value:
    return select(as_int(a) < 0, -as_int(a), a, "int")


def _to_int(node: Node, a: Value) -> Value:
    # a boolean is 0 or 1; a float loses what is behind its point
    return as_int(select(a, 1, 0, "int")) if node.args[0].kind == "bool" else as_int(a)


def _to_float(node: Node, a: Value) -> Value:
    return select(a, 1.0, 0.0, "float") if node.args[0].kind == "bool" else as_float(a)


def _sigmoid(x: Value) -> Value:
    return as_float(1.0) / (as_float(1.0) + device.exp2(x * -math.log2(math.e)))


def _sign(x: Value) -> Value:
    return select(x > 0.0, 1.0, select(x < 0.0, -1.0, x, "float"), "float")


def _is_zero(node: Node, a: Value) -> Value:
    return as_float(a) == 0.0 if node.args[0].kind == "float" else as_int(a) == 0


_SAME_NAME = (
    "exp", "exp2", "expm1", "log", "log2", "log1p", "tanh", "sin", "cos", "tan", "asin", "acos",
    "atan", "sinh", "cosh", "sqrt", "erf", "erfc", "floor", "ceil", "trunc",
)  # fmt: skip

_OPERATIONS: dict[str, Callable[..., Value]] = {
    "add": _numeric(lambda a, b: a + b, lambda a, b: as_int(a) + as_int(b)),
    "sub": _numeric(lambda a, b: a - b, lambda a, b: as_int(a) - as_int(b)),
    "neg": _numeric(lambda a: -a, lambda a: -as_int(a)),
    "mul": _fold(lambda a, b: a * b),
    "div": _numeric(lambda a, b: a / b, lambda a, b: as_float(a) / as_float(b)),
    "floordiv": _numeric(lambda a, b: device.floor(a / b), _floor_div),
    "mod": _numeric(_float_modulo, _modulo),
    "abs": _numeric(device.absf, _int_abs),
    "min": _fold(lambda a, b: _extremum(a, b, cute.arch.fmin, _least)),
    "max": _fold(lambda a, b: _extremum(a, b, cute.arch.fmax, _most)),
    "pow": _numeric(device.pow, device.pow),
    "atan2": lambda node, a, b: device.atan2(as_float(a), as_float(b)),
    "float": _to_float,
    "int": _to_int,
    "ge0": lambda node, a: a >= 0,
    "eq0": _is_zero,
    "le": _compare(lambda a, b: a <= b),
    "lt": _compare(lambda a, b: a < b),
    "eq": _compare(lambda a, b: a == b),
    "not": lambda node, a: not a if isinstance(a, bool) else as_int(a) == 0,
    "and": _logical(lambda a, b: a & b),
    "or": _logical(lambda a, b: a | b),
    "xor": _logical(lambda a, b: a ^ b),
    "where": lambda node, c, a, b: select(c, a, b, node.kind),
    "bitand": _fold(lambda a, b: as_int(a) & as_int(b)),
    "bitor": _fold(lambda a, b: as_int(a) | as_int(b)),
    "bitxor": _fold(lambda a, b: as_int(a) ^ as_int(b)),
    "bitshl": _fold(lambda a, b: as_int(a) << as_int(b)),
    "bitshr": _fold(lambda a, b: as_int(a) >> as_int(b)),
    **{name: _unary(getattr(device, name)) for name in _SAME_NAME},
    "round": _unary(device.roundeven),
    "rsqrt": _unary(lambda x: as_float(1.0) / device.sqrt(x)),
    "sigmoid": _unary(_sigmoid),
    "sign": _unary(_sign),
}


def _extremum(
    a: Value, b: Value, floats: Callable[..., Value], ints: Callable[..., Value]
) -> Value:
    is_float = any(isinstance(x, float | cutlass.Float32) for x in (a, b))
    return floats(as_float(a), as_float(b)) if is_float else ints(a, b)
