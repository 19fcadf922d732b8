"""Rules of sums and other reductions, which are written out element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from primitives.expr import algebra as A
from primitives.expr.arrays import Array, Scatter, Value
from primitives.expr.aten.rules import (
    RULES,
    Result,
    Rule,
    as_array,
    cast,
)
from primitives.expr.errors import Refusal
from primitives.expr.node import Node

#: The longest sum, dot product or other reduction that is written out element by element.
MAX_REDUCTION = 512


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
                value = cast(array.at(full), out.kind)
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
    return RULES["aten.div"](out, REDUCTIONS["aten.sum"](out, a, dims, keepdim), count)


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
