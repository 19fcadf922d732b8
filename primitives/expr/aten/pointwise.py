"""Rules of pointwise operators: arithmetic, comparison, logic, casts, constants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from primitives.expr import algebra as A
from primitives.expr import arrays
from primitives.expr.arrays import Array, Scatter, Value
from primitives.expr.aten.rules import (
    RULES,
    Result,
    Rule,
    as_array,
    as_value,
    cast,
    elementwise,
    plain,
    promoted,
    rule,
)
from primitives.expr.node import Node


@rule("aten.add")
def _add(out: Result, a: Any, b: Any, alpha: int | float = 1) -> Value:
    if isinstance(a, Scatter) or isinstance(b, Scatter):
        return arrays.add(as_value(a), as_value(b))
    if out.kind == "bool":
        return elementwise(out, A.logical_or, a, b)
    return promoted(lambda x, y: A.add(x, A.mul(y, alpha) if alpha != 1 else y))(out, a, b)


@rule("aten.sub")
def _sub(out: Result, a: Any, b: Any, alpha: int | float = 1) -> Value:
    if isinstance(b, Scatter):
        return arrays.add(as_value(a), arrays.scale(b, as_array(-1.0), A.mul))
    return promoted(lambda x, y: A.sub(x, A.mul(y, alpha) if alpha != 1 else y))(out, a, b)


@rule("aten.rsub")
def _rsub(out: Result, a: Any, b: Any, alpha: int | float = 1) -> Value:
    return _sub(out, b, a, alpha)


@rule("aten.mul")
def _mul(out: Result, a: Any, b: Any) -> Value:
    if isinstance(a, Scatter):
        return arrays.scale(a, as_array(b), A.mul)
    if isinstance(b, Scatter):
        return arrays.scale(b, as_array(a), A.mul)
    if out.kind == "bool":
        return elementwise(out, A.logical_and, a, b)
    return promoted(A.mul)(out, a, b)


@rule("aten.div")
def _div(out: Result, a: Any, b: Any, rounding_mode: str | None = None) -> Value:
    if isinstance(a, Scatter):
        return arrays.scale(a, as_array(b), A.div)
    if rounding_mode == "floor":
        return promoted(A.floordiv)(out, a, b)
    if rounding_mode == "trunc":
        return promoted(_truncated)(out, a, b)
    return promoted(A.div)(out, a, b)


def _truncated(a: Node, b: Node) -> Node:
    if a.kind == "float":
        return A.unary("trunc", A.div(a, b))
    magnitude = A.floordiv(A.absolute(a), A.absolute(b))
    negative = A.logical_xor(A.less(a, 0), A.less(b, 0))
    return A.where(negative, A.neg(magnitude), magnitude)


@rule("aten.fmod")
def _fmod(out: Result, a: Any, b: Any) -> Value:
    return promoted(lambda x, y: A.sub(x, A.mul(_truncated(x, y), y)))(out, a, b)


@rule("aten.neg")
def _neg(out: Result, a: Any) -> Value:
    if isinstance(a, Scatter):
        return arrays.scale(a, as_array(-1.0), A.mul)
    return promoted(A.neg)(out, a)


@rule("aten.pow")
def _pow(out: Result, a: Any, b: Any) -> Value:
    return promoted(A.power)(out, a, b)


@rule("aten.clamp", "aten.clip")
def _clamp(out: Result, a: Any, lower: Any = None, upper: Any = None, **named: Any) -> Value:
    lower, upper = named.get("min", lower), named.get("max", upper)
    result: Value = promoted(lambda x: x)(out, a)
    if lower is not None:
        result = promoted(lambda x, y: A.extremum("max", x, y))(out, result, lower)
    if upper is not None:
        result = promoted(lambda x, y: A.extremum("min", x, y))(out, result, upper)
    return result


@rule("aten.clamp_min")
def _clamp_min(out: Result, a: Any, bound: Any) -> Value:
    return _clamp(out, a, bound)


@rule("aten.clamp_max")
def _clamp_max(out: Result, a: Any, bound: Any) -> Value:
    return _clamp(out, a, None, bound)


@rule("aten.sign")
def _sign(out: Result, a: Any) -> Value:
    def sign(x: Node) -> Node:
        if x.kind == "float":
            return A.unary("sign", x)
        return A.where(A.less(0, x), 1, A.where(A.less(x, 0), -1, 0))

    return promoted(sign)(out, a)


RULES |= {
    "aten.floor_divide": promoted(A.floordiv),
    "aten.remainder": promoted(A.mod),
    "aten.abs": promoted(A.absolute),
    "aten.maximum": promoted(lambda a, b: A.extremum("max", a, b)),
    "aten.minimum": promoted(lambda a, b: A.extremum("min", a, b)),
    "aten.fmax": promoted(lambda a, b: A.extremum("max", a, b)),
    "aten.fmin": promoted(lambda a, b: A.extremum("min", a, b)),
    "aten.reciprocal": promoted(lambda a: A.div(1.0, a)),
    "aten.square": promoted(lambda a: A.mul(a, a)),
    "aten.relu": promoted(lambda a: A.extremum("max", a, A.cast(A.const(0), a.kind))),
    "aten.atan2": plain(lambda a, b: Node("atan2", (A.to_float(a), A.to_float(b)), "float")),
    "aten.tanh": plain(lambda a: A.unary("tanh", a)),
    "approx.tanh": plain(lambda a: A.unary("tanh", a)),  # attention-gym's custom operator
}


def _gelu(out: Result, a: Any, approximate: str = "none") -> Value:
    def exact(x: Node) -> Node:
        return A.mul(A.mul(x, 0.5), A.add(1.0, A.unary("erf", A.mul(x, math.sqrt(0.5)))))

    def by_tanh(x: Node) -> Node:
        inner = A.mul(math.sqrt(2 / math.pi), A.add(x, A.mul(0.044715, A.power(x, 3))))
        return A.mul(A.mul(x, 0.5), A.add(1.0, A.unary("tanh", inner)))

    return promoted(by_tanh if approximate == "tanh" else exact)(out, a)


RULES |= {
    "aten.gelu": _gelu,
    "aten.silu": promoted(lambda a: A.mul(a, A.unary("sigmoid", a))),
    "aten.hypot": promoted(lambda a, b: A.unary("sqrt", A.add(A.mul(a, a), A.mul(b, b)))),
    "aten.log10": plain(lambda a: A.mul(A.unary("log", a), 1 / math.log(10))),
}
for _name in sorted(A.UNARY - {"sign", "tanh"}):
    RULES[f"aten.{_name}"] = plain(lambda a, _op=_name: A.unary(_op, a))

# ------------------------------------------------------------------------ comparison and logic


def _bits(op: str, logical: Callable[..., Node]) -> Rule:
    def apply(out: Result, *operands: Any) -> Value:
        if out.kind == "bool":
            return elementwise(out, logical, *operands)
        return elementwise(out, lambda a, b: A.bitwise(op, a, b), *operands)

    return apply


RULES |= {
    "aten.lt": plain(A.less),
    "aten.le": plain(A.less_equal),
    "aten.gt": plain(lambda a, b: A.less(b, a)),
    "aten.ge": plain(lambda a, b: A.less_equal(b, a)),
    "aten.eq": plain(A.equal),
    "aten.ne": plain(lambda a, b: A.logical_not(A.equal(a, b))),
    "aten.logical_and": plain(A.logical_and),
    "aten.logical_or": plain(A.logical_or),
    "aten.logical_xor": plain(A.logical_xor),
    "aten.logical_not": plain(A.logical_not),
    "aten.bitwise_and": _bits("and", A.logical_and),
    "aten.bitwise_or": _bits("or", A.logical_or),
    "aten.bitwise_xor": _bits("xor", A.logical_xor),
    "aten.bitwise_left_shift": plain(lambda a, b: A.bitwise("shl", a, b)),
    "aten.bitwise_right_shift": plain(lambda a, b: A.bitwise("shr", a, b)),
    "aten.__and__": _bits("and", A.logical_and),
    "aten.__or__": _bits("or", A.logical_or),
    "aten.__xor__": _bits("xor", A.logical_xor),
    "aten.__lshift__": plain(lambda a, b: A.bitwise("shl", a, b)),
    "aten.__rshift__": plain(lambda a, b: A.bitwise("shr", a, b)),
    "aten.isnan": plain(lambda a: A.logical_not(A.equal(A.to_float(a), A.to_float(a)))),
    "aten.isfinite": plain(lambda a: A.less(A.absolute(A.to_float(a)), math.inf)),
    "aten.isinf": plain(lambda a: A.equal(A.absolute(A.to_float(a)), math.inf)),
}


@rule("aten.bitwise_not")
def _bitwise_not(out: Result, a: Any) -> Value:
    return elementwise(out, A.logical_not if out.kind == "bool" else A.bitnot, a)


@rule("aten.where")
def _where(out: Result, condition: Any, a: Any, b: Any) -> Value:
    if isinstance(a, Scatter) or isinstance(b, Scatter):
        return _where_scatter(as_array(condition), as_value(a), as_value(b))
    return elementwise(
        out, lambda c, x, y: A.where(c, cast(x, out.kind), cast(y, out.kind)), condition, a, b
    )


@rule("aten.masked_fill")
def _masked_fill(out: Result, a: Any, mask: Any, value: Any) -> Value:
    return _where(out, mask, value, a)


@rule("aten.copy", "aten.fill")
def _copy(out: Result, a: Any, source: Any, *_: Any, **__: Any) -> Value:
    return RULES["aten.expand"](out, source)


def _where_scatter(condition: Array, a: Value, b: Value) -> Value:
    keep = arrays.elementwise(A.logical_not, "bool", [condition])
    left = arrays.scale(arrays.scatter(a), condition, lambda v, c: A.where(c, v, 0.0))
    right = arrays.scale(arrays.scatter(b), keep, lambda v, c: A.where(c, v, 0.0))
    return arrays.add(left, right)


# ------------------------------------------------------------------------- casts and constants


@rule("aten._to_copy", "prims.convert_element_type", "aten.to")
def _to_copy(out: Result, a: Any, *_: Any, **__: Any) -> Value:
    if isinstance(a, Scatter):
        return a
    return elementwise(out, lambda x: x, a)


@rule(
    "aten.alias",
    "aten.real",
    "aten.clone",
    "aten.detach",
    "aten.lift_fresh_copy",
    "aten.conj_physical",
)
def _identity(out: Result, a: Any, **_: Any) -> Value:
    return as_value(a)


@rule("aten.scalar_tensor", "prims.scalar_tensor", "aten.full", "aten.full_like", "aten.new_full")
def _full(out: Result, *args: Any, **_: Any) -> Value:
    value = args[-1]
    if out.kind == "float" and value == 0 and out.shape:
        return Scatter(out.shape)
    node = A.cast(A.const(value), out.kind)
    return Array(out.shape, out.kind, lambda _: node)


@rule("aten.zeros", "aten.zeros_like", "aten.new_zeros")
def _zeros(out: Result, *_: Any, **__: Any) -> Value:
    return _full(out, 0)


@rule("aten.ones", "aten.ones_like", "aten.new_ones")
def _ones(out: Result, *_: Any, **__: Any) -> Value:
    return _full(out, 1)


@rule("aten.arange", "prims.iota")
def _arange(out: Result, *args: Any, start: float = 0, step: float = 1, **_: Any) -> Value:
    numbers = [a for a in args if isinstance(a, int | float)]
    if len(numbers) > 1:
        start, step = numbers[0], numbers[2] if len(numbers) > 2 else 1
    return Array(out.shape, out.kind, lambda i: cast(A.add(A.mul(i[0], step), start), out.kind))
