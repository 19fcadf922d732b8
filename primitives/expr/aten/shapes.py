"""Rules of views and of indexing: which element of an array is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from primitives.expr import algebra as A
from primitives.expr import arrays
from primitives.expr.arrays import Array, Scatter, Value
from primitives.expr.aten.rules import (
    Result,
    as_array,
    as_value,
    cast,
    rule,
)
from primitives.expr.errors import Refusal
from primitives.expr.node import Node


@rule("aten.view", "aten.reshape", "aten._unsafe_view", "aten.unsqueeze", "aten.squeeze")
def _view(out: Result, a: Any, *_: Any) -> Value:
    return arrays.reshape(as_value(a), out.shape)


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
            value = cast(part.at((*i[:dim], inside, *i[dim + 1 :])), out.kind)
            chosen = value if chosen is None else A.where(A.less(i[dim], end), value, chosen)
        return A.cast(A.const(0), out.kind) if chosen is None else chosen

    return Array(out.shape, out.kind, at)
