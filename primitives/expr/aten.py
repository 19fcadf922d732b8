"""ATen operators as rules on `Array`s: the vocabulary a traced function may use.

`RULES[name](node_meta, *args, **kwargs)` handles one operator. Arguments are arrays, scatters or
plain Python values as they stand in the traced graph; `out` is the operator's result type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from primitives.expr import algebra as A
from primitives.expr import arrays
from primitives.expr.arrays import Array, Scatter, Value
from primitives.expr.errors import Refusal
from primitives.expr.node import Kind, Node, kind_of

#: The longest sum, dot product or other reduction that is written out element by element.
MAX_REDUCTION = 512


@attrs.frozen
class Result:
    """Shape and dtype of what an operator returns."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def kind(self) -> Kind:
        return kind_of(self.dtype)


Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def as_array(value: Any) -> Array:
    if isinstance(value, Array | Scatter):
        return arrays.materialise(value)
    return arrays.scalar(A.const(value))


def _cast(node: Node, kind: Kind) -> Node:
    return A.cast(node, kind)


def _elementwise(out: Result, function: Callable[..., Node], *operands: Any) -> Array:
    kind = out.kind
    return arrays.elementwise(
        lambda *nodes: _cast(function(*nodes), kind), kind, [as_array(o) for o in operands]
    )


def _promoted(function: Callable[..., Node]) -> Rule:
    """An arithmetic operator: operands take the result's kind first, as torch promotes them."""

    def apply(out: Result, *operands: Any) -> Value:
        return _elementwise(out, lambda *n: function(*(_cast(x, out.kind) for x in n)), *operands)

    return apply


def _plain(function: Callable[..., Node]) -> Rule:
    return lambda out, *operands: _elementwise(out, function, *operands)


# -------------------------------------------------------------------------------- arithmetic


@rule("aten.add")
def _add(out: Result, a: Any, b: Any, alpha: int | float = 1) -> Value:
    if isinstance(a, Scatter) or isinstance(b, Scatter):
        return arrays.add(_value(a), _value(b))
    if out.kind == "bool":
        return _elementwise(out, A.logical_or, a, b)
    return _promoted(lambda x, y: A.add(x, A.mul(y, alpha) if alpha != 1 else y))(out, a, b)


@rule("aten.sub")
def _sub(out: Result, a: Any, b: Any, alpha: int | float = 1) -> Value:
    if isinstance(b, Scatter):
        return arrays.add(_value(a), arrays.scale(b, as_array(-1.0), A.mul))
    return _promoted(lambda x, y: A.sub(x, A.mul(y, alpha) if alpha != 1 else y))(out, a, b)


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
        return _elementwise(out, A.logical_and, a, b)
    return _promoted(A.mul)(out, a, b)


@rule("aten.div")
def _div(out: Result, a: Any, b: Any, rounding_mode: str | None = None) -> Value:
    if isinstance(a, Scatter):
        return arrays.scale(a, as_array(b), A.div)
    if rounding_mode == "floor":
        return _promoted(A.floordiv)(out, a, b)
    if rounding_mode == "trunc":
        return _promoted(_truncated)(out, a, b)
    return _promoted(A.div)(out, a, b)


def _truncated(a: Node, b: Node) -> Node:
    if a.kind == "float":
        return A.unary("trunc", A.div(a, b))
    magnitude = A.floordiv(A.absolute(a), A.absolute(b))
    negative = A.logical_xor(A.less(a, 0), A.less(b, 0))
    return A.where(negative, A.neg(magnitude), magnitude)


@rule("aten.fmod")
def _fmod(out: Result, a: Any, b: Any) -> Value:
    return _promoted(lambda x, y: A.sub(x, A.mul(_truncated(x, y), y)))(out, a, b)


@rule("aten.neg")
def _neg(out: Result, a: Any) -> Value:
    if isinstance(a, Scatter):
        return arrays.scale(a, as_array(-1.0), A.mul)
    return _promoted(A.neg)(out, a)


@rule("aten.pow")
def _pow(out: Result, a: Any, b: Any) -> Value:
    return _promoted(A.power)(out, a, b)


@rule("aten.clamp", "aten.clip")
def _clamp(out: Result, a: Any, lower: Any = None, upper: Any = None, **named: Any) -> Value:
    lower, upper = named.get("min", lower), named.get("max", upper)
    result: Value = _promoted(lambda x: x)(out, a)
    if lower is not None:
        result = _promoted(lambda x, y: A.extremum("max", x, y))(out, result, lower)
    if upper is not None:
        result = _promoted(lambda x, y: A.extremum("min", x, y))(out, result, upper)
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

    return _promoted(sign)(out, a)


RULES |= {
    "aten.floor_divide": _promoted(A.floordiv),
    "aten.remainder": _promoted(A.mod),
    "aten.abs": _promoted(A.absolute),
    "aten.maximum": _promoted(lambda a, b: A.extremum("max", a, b)),
    "aten.minimum": _promoted(lambda a, b: A.extremum("min", a, b)),
    "aten.fmax": _promoted(lambda a, b: A.extremum("max", a, b)),
    "aten.fmin": _promoted(lambda a, b: A.extremum("min", a, b)),
    "aten.reciprocal": _promoted(lambda a: A.div(1.0, a)),
    "aten.square": _promoted(lambda a: A.mul(a, a)),
    "aten.relu": _promoted(lambda a: A.extremum("max", a, A.cast(A.const(0), a.kind))),
    "aten.atan2": _plain(lambda a, b: Node("atan2", (A.to_float(a), A.to_float(b)), "float")),
    "aten.tanh": _plain(lambda a: A.unary("tanh", a)),
    "approx.tanh": _plain(lambda a: A.unary("tanh", a)),  # attention-gym's custom operator
}


def _gelu(out: Result, a: Any, approximate: str = "none") -> Value:
    def exact(x: Node) -> Node:
        return A.mul(A.mul(x, 0.5), A.add(1.0, A.unary("erf", A.mul(x, math.sqrt(0.5)))))

    def by_tanh(x: Node) -> Node:
        inner = A.mul(math.sqrt(2 / math.pi), A.add(x, A.mul(0.044715, A.power(x, 3))))
        return A.mul(A.mul(x, 0.5), A.add(1.0, A.unary("tanh", inner)))

    return _promoted(by_tanh if approximate == "tanh" else exact)(out, a)


RULES |= {
    "aten.gelu": _gelu,
    "aten.silu": _promoted(lambda a: A.mul(a, A.unary("sigmoid", a))),
    "aten.hypot": _promoted(lambda a, b: A.unary("sqrt", A.add(A.mul(a, a), A.mul(b, b)))),
    "aten.log10": _plain(lambda a: A.mul(A.unary("log", a), 1 / math.log(10))),
}
for _name in sorted(A.UNARY - {"sign", "tanh"}):
    RULES[f"aten.{_name}"] = _plain(lambda a, _op=_name: A.unary(_op, a))

# ------------------------------------------------------------------------ comparison and logic


def _bits(op: str, logical: Callable[..., Node]) -> Rule:
    def apply(out: Result, *operands: Any) -> Value:
        if out.kind == "bool":
            return _elementwise(out, logical, *operands)
        return _elementwise(out, lambda a, b: A.bitwise(op, a, b), *operands)

    return apply


RULES |= {
    "aten.lt": _plain(A.less),
    "aten.le": _plain(A.less_equal),
    "aten.gt": _plain(lambda a, b: A.less(b, a)),
    "aten.ge": _plain(lambda a, b: A.less_equal(b, a)),
    "aten.eq": _plain(A.equal),
    "aten.ne": _plain(lambda a, b: A.logical_not(A.equal(a, b))),
    "aten.logical_and": _plain(A.logical_and),
    "aten.logical_or": _plain(A.logical_or),
    "aten.logical_xor": _plain(A.logical_xor),
    "aten.logical_not": _plain(A.logical_not),
    "aten.bitwise_and": _bits("and", A.logical_and),
    "aten.bitwise_or": _bits("or", A.logical_or),
    "aten.bitwise_xor": _bits("xor", A.logical_xor),
    "aten.bitwise_left_shift": _plain(lambda a, b: A.bitwise("shl", a, b)),
    "aten.bitwise_right_shift": _plain(lambda a, b: A.bitwise("shr", a, b)),
    "aten.__and__": _bits("and", A.logical_and),
    "aten.__or__": _bits("or", A.logical_or),
    "aten.__xor__": _bits("xor", A.logical_xor),
    "aten.__lshift__": _plain(lambda a, b: A.bitwise("shl", a, b)),
    "aten.__rshift__": _plain(lambda a, b: A.bitwise("shr", a, b)),
    "aten.isnan": _plain(lambda a: A.logical_not(A.equal(A.to_float(a), A.to_float(a)))),
    "aten.isfinite": _plain(lambda a: A.less(A.absolute(A.to_float(a)), math.inf)),
    "aten.isinf": _plain(lambda a: A.equal(A.absolute(A.to_float(a)), math.inf)),
}


@rule("aten.bitwise_not")
def _bitwise_not(out: Result, a: Any) -> Value:
    return _elementwise(out, A.logical_not if out.kind == "bool" else A.bitnot, a)


@rule("aten.where")
def _where(out: Result, condition: Any, a: Any, b: Any) -> Value:
    if isinstance(a, Scatter) or isinstance(b, Scatter):
        return _where_scatter(as_array(condition), _value(a), _value(b))
    return _elementwise(
        out, lambda c, x, y: A.where(c, _cast(x, out.kind), _cast(y, out.kind)), condition, a, b
    )


@rule("aten.masked_fill")
def _masked_fill(out: Result, a: Any, mask: Any, value: Any) -> Value:
    return _where(out, mask, value, a)


@rule("aten.copy", "aten.fill")
def _copy(out: Result, a: Any, source: Any, *_: Any, **__: Any) -> Value:
    return _expand(out, source)


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
    return _elementwise(out, lambda x: x, a)


@rule(
    "aten.alias",
    "aten.real",
    "aten.clone",
    "aten.detach",
    "aten.lift_fresh_copy",
    "aten.conj_physical",
)
def _identity(out: Result, a: Any, **_: Any) -> Value:
    return _value(a)


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
    return Array(out.shape, out.kind, lambda i: _cast(A.add(A.mul(i[0], step), start), out.kind))


# --------------------------------------------------------------------------- shapes, indexing


def _value(value: Any) -> Value:
    return value if isinstance(value, Array | Scatter) else as_array(value)


@rule("aten.view", "aten.reshape", "aten._unsafe_view", "aten.unsqueeze", "aten.squeeze")
def _view(out: Result, a: Any, *_: Any) -> Value:
    return arrays.reshape(_value(a), out.shape)


@rule("aten.expand")
def _expand(out: Result, a: Any, *_: Any, **__: Any) -> Value:
    array = as_array(a)
    return arrays.elementwise(lambda x, _: x, array.kind, [array, _full_shape(out.shape)])


def _full_shape(shape: tuple[int, ...]) -> Array:
    return Array(shape, "int", lambda _: A.const(0))


@rule("aten.permute")
def _permute(out: Result, a: Any, order: Sequence[int]) -> Value:
    order = [d % len(out.shape) for d in order]
    if isinstance(a, Scatter):
        return Scatter(out.shape, tuple((tuple(i[d] for d in order), v) for i, v in a.entries))
    array = as_array(a)
    place = [order.index(d) for d in range(len(order))]
    return Array(out.shape, array.kind, lambda i: array.at(tuple(i[p] for p in place)))


@rule("aten.transpose", "aten.t")
def _transpose(out: Result, a: Any, first: int = 0, second: int = 1) -> Value:
    order = list(range(len(out.shape)))
    if len(order) > 1:
        order[first], order[second] = order[second], order[first]
    return _permute(out, a, order)


@rule("aten.select")
def _select(out: Result, a: Any, dim: int, index: int) -> Value:
    array = as_array(a)
    dim %= len(array.shape)
    fixed = A.const(index % array.shape[dim])
    return Array(out.shape, array.kind, lambda i: array.at((*i[:dim], fixed, *i[dim:])))


@rule("aten.slice")
def _slice(
    out: Result, a: Any, dim: int = 0, start: Any = 0, end: Any = None, step: int = 1
) -> Value:
    array = as_array(a)
    dim %= len(array.shape)
    first, _, _ = slice(start, end, step).indices(array.shape[dim])
    return Array(
        out.shape,
        array.kind,
        lambda i: array.at((*i[:dim], A.add(A.mul(i[dim], step), first), *i[dim + 1 :])),
    )


@rule("aten.unbind")
def _unbind(out: Result, a: Any, dim: int = 0) -> list[Value]:
    array = as_array(a)
    return [_select(out, array, dim, i) for i in range(array.shape[dim % len(array.shape)])]


@rule("aten.split", "aten.split_with_sizes")
def _split(out: Result, a: Any, sizes: int | Sequence[int], dim: int = 0) -> list[Value]:
    array = as_array(a)
    dim %= len(array.shape)
    length = array.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - i) for i in range(0, length, sizes)]
    parts: list[Value] = []
    start = 0
    for size in sizes:
        shape = (*array.shape[:dim], size, *array.shape[dim + 1 :])
        parts.append(_slice(Result(shape, out.dtype), array, dim, start, start + size))
        start += size
    return parts


@rule("aten.index", "aten._unsafe_index")
def _index(out: Result, a: Any, indices: Sequence[Any]) -> Value:
    array = as_array(a)
    given = [None if i is None else as_array(i) for i in indices]
    if any(i is not None and i.kind == "bool" for i in given):
        raise Refusal("indexing by a boolean selects a varying number; use torch.where")
    given += [None] * (len(array.shape) - len(given))
    shape = arrays.broadcast([i.shape for i in given if i is not None])
    place = arrays.index_place(given)

    def at(position: tuple[Node, ...]) -> Node:
        inner = position[place : place + len(shape)]
        rest = iter(position[:place] + position[place + len(shape) :])
        return array.at(
            tuple(
                next(rest) if i is None else i.at(inner[len(inner) - len(i.shape) :]) for i in given
            )
        )

    return Array(out.shape, array.kind, at)


@rule("aten.gather")
def _gather(out: Result, a: Any, dim: int, index: Any, **_: Any) -> Value:
    array, chosen = as_array(a), as_array(index)
    if not array.shape:
        return array
    dim %= len(array.shape)
    return Array(out.shape, array.kind, lambda i: array.at((*i[:dim], chosen.at(i), *i[dim + 1 :])))


@rule("aten.take")
def _take(out: Result, a: Any, index: Any) -> Value:
    array = as_array(a)
    flat = arrays.reshape(array, (math.prod(array.shape),))
    return _index(out, flat, [index])


@rule("aten.cat")
def _cat(out: Result, parts: Sequence[Any], dim: int = 0) -> Value:
    given = [as_array(p) for p in parts]
    dim %= len(out.shape)

    def at(i: tuple[Node, ...]) -> Node:
        start, chosen = out.shape[dim], None
        for part in reversed([p for p in given if p.shape[dim]]):
            end, size = start, part.shape[dim]
            start -= size
            inside = A.sub(i[dim], start)
            if size < out.shape[dim]:  # of an index in another part: any element, it isn't used
                inside = A.extremum("min", A.extremum("max", inside, 0), size - 1)
            value = _cast(part.at((*i[:dim], inside, *i[dim + 1 :])), out.kind)
            chosen = value if chosen is None else A.where(A.less(i[dim], end), value, chosen)
        return A.cast(A.const(0), out.kind) if chosen is None else chosen

    return Array(out.shape, out.kind, at)


# -------------------------------------------------------------------------------- reductions


def _reduction(combine: Callable[[Node, Node], Node]) -> Rule:
    def apply(out: Result, a: Any, dims: Any = None, keepdim: bool = False, **_: Any) -> Value:
        if isinstance(a, Scatter):
            return _sum_scatter(out, a, dims, keepdim)
        array = as_array(a)
        rank = len(array.shape)
        reduced = reduced_dims(dims, rank)
        count = math.prod(array.shape[d] for d in reduced)
        if count > MAX_REDUCTION:
            raise Refusal(
                f"a reduction over {count} elements inside a mask or score function; at most "
                f"{MAX_REDUCTION} are written out. Reduce before, and capture the result."
            )

        def at(i: tuple[Node, ...]) -> Node:
            kept = [x for d, x in enumerate(i) if not keepdim or d not in reduced]
            total = None
            for cell in _cells([array.shape[d] for d in sorted(reduced)]):
                inner, rest = iter(cell), iter(kept)
                full = tuple(next(inner) if d in reduced else next(rest) for d in range(rank))
                value = _cast(array.at(full), out.kind)
                total = value if total is None else combine(total, value)
            return A.cast(A.const(0), out.kind) if total is None else total

        return Array(out.shape, out.kind, at)

    return apply


def _cells(sizes: Sequence[int]) -> list[tuple[Node, ...]]:
    cells: list[tuple[Node, ...]] = [()]
    for size in sizes:
        cells = [(*c, A.const(i)) for c in cells for i in range(size)]
    return cells


def _sum_scatter(out: Result, a: Scatter, dims: Any, keepdim: bool) -> Value:
    reduced = reduced_dims(dims, len(a.shape))

    def kept(i: tuple[Node, ...]) -> tuple[Node, ...]:
        cells = [A.const(0) if d in reduced else x for d, x in enumerate(i)]
        return tuple(x for d, x in enumerate(cells) if keepdim or d not in reduced)

    return Scatter(out.shape, tuple((kept(i), v) for i, v in a.entries))


def _whole(op: str) -> Rule:
    def apply(out: Result, a: Any, *dims: Any) -> Value:
        if dims:
            raise Refusal(f"torch.{op} along a dimension; use torch.a{op}")
        return REDUCTIONS[f"aten.a{op}"](out, a)

    return apply


def _mean(out: Result, a: Any, dims: Any = None, keepdim: bool = False, **_: Any) -> Value:
    shape = a.shape
    count = math.prod(shape[d] for d in reduced_dims(dims, len(shape)))
    return _div(out, REDUCTIONS["aten.sum"](out, a, dims, keepdim), count)


def reduced_dims(dims: int | Sequence[int] | None, rank: int) -> set[int]:
    """The dimensions a reduction goes over; none given are all."""
    if isinstance(dims, int):
        return {dims % rank} if rank else set()
    return {d % rank for d in dims or range(rank)} if rank else set()


REDUCTIONS: dict[str, Rule] = {
    "aten.sum": _reduction(A.add),
    "aten.amax": _reduction(lambda a, b: A.extremum("max", a, b)),
    "aten.amin": _reduction(lambda a, b: A.extremum("min", a, b)),
    "aten.max": _whole("max"),
    "aten.min": _whole("min"),
    "aten.any": _reduction(A.logical_or),
    "aten.all": _reduction(A.logical_and),
    "aten.prod": _reduction(A.mul),
    "aten.mean": _mean,
    "prims.sum": _reduction(A.add),
}
RULES |= REDUCTIONS

# --------------------------------------------------------------------------------- gradients

RULES |= {
    "aten.tanh_backward": _promoted(lambda g, y: A.mul(g, A.sub(1.0, A.mul(y, y)))),
    "aten.sigmoid_backward": _promoted(lambda g, y: A.mul(g, A.mul(y, A.sub(1.0, y)))),
    "aten.threshold_backward": _promoted(lambda g, x, t: A.where(A.less(t, x), g, 0.0)),
}


@rule("aten.index_put", "aten._index_put_impl", "aten._unsafe_index_put")
def _index_put(out: Result, a: Any, indices: Sequence[Any], value: Any, *flags: Any) -> Value:
    """`zeros.index_put(indices, value, accumulate=True)`: the gradient of indexing."""
    base, given = _value(a), [None if i is None else as_array(i) for i in indices]
    if not isinstance(base, Scatter) or any(i is not None and i.shape for i in given):
        raise Refusal("writing into a tensor inside a mask or score function")
    given += [None] * (len(base.shape) - len(given))
    entries = []
    for position, node in arrays.scatter(_value(value)).entries:
        rest = iter(position)
        entries.append((tuple(next(rest) if i is None else i.scalar for i in given), node))
    return Scatter(out.shape, base.entries + tuple(entries))


@rule("aten.select_scatter", "aten.select_backward")
def _select_scatter(out: Result, a: Any, *args: Any) -> Value:
    if isinstance(args[0], list | tuple):  # select_backward(grad, sizes, dim, index)
        source, dim, index, base = a, args[1], args[2], Scatter(out.shape)
    else:  # select_scatter(zeros, source, dim, index)
        (source, dim, index), base = args, arrays.scatter(_value(a))
    dim %= len(out.shape)
    fixed = A.const(index % out.shape[dim])
    entries = arrays.scatter(_value(source)).entries
    return Scatter(
        out.shape, base.entries + tuple(((*i[:dim], fixed, *i[dim:]), v) for i, v in entries)
    )


@rule("aten.slice_scatter", "aten.slice_backward")
def _slice_scatter(out: Result, a: Any, *args: Any) -> Value:
    if isinstance(args[0], list | tuple):  # slice_backward(grad, sizes, dim, start, end, step)
        source, (dim, start, end, step) = a, args[1:5]
        base = Scatter(out.shape)
    else:  # slice_scatter(zeros, source, dim, start, end, step)
        source, base = args[0], arrays.scatter(_value(a))
        dim, start, end, step = list(args[1:]) + [0, None, None, 1][len(args) - 1 :]
    dim %= len(out.shape)
    first, _, _ = slice(start, end, step).indices(out.shape[dim])
    entries = arrays.scatter(_value(source)).entries
    return Scatter(
        out.shape,
        base.entries
        + tuple(
            ((*i[:dim], A.add(A.mul(i[dim], step), first), *i[dim + 1 :]), v) for i, v in entries
        ),
    )
