"""Rules of casts, comparisons and logic on ranges, and the dispatch of operations by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fa4core.lowering.float_ranges import (
    atan2,
    divide,
    monotonic,
    multiply,
    power,
    remainder,
    rounded,
    unary,
)
from fa4core.lowering.ranges import (
    Array,
    Range,
    absolute,
    bitwise,
    floordiv,
    forget,
    linear,
    mod,
    product,
    shift,
    unbounded_in,
    unknown,
)


def cast(kind: str, a: Range) -> Range:
    source = np.asarray(a.lo).dtype.kind
    if kind == "float":
        lo, hi = np.asarray(a.lo, np.float64), np.asarray(a.hi, np.float64)
        if source == "i" and not a.bounded:
            hidden = unbounded_in(a)
            return forget(rounded(lo, hi), hidden)
        return rounded(lo, lo if a.exact else hi)
    if source == "b":
        lo = np.asarray(a.lo, np.int64)
        return Range(lo) if a.exact else Range(lo, np.asarray(a.hi, np.int64))
    wild = ~((np.abs(a.lo) < 2.0**53) & (np.abs(a.hi) < 2.0**53))
    lo = np.where(wild, 0, np.trunc(a.lo)).astype(np.int64)
    hi = lo if a.exact else np.where(wild, 0, np.trunc(a.hi)).astype(np.int64)
    return forget(Range(lo, hi), wild)


def _three(must: Array, may: Array) -> Range:
    return Range(must, may)


def _at_least_zero(a: Range) -> Range:
    return Range(a.lo >= 0) if a.exact else Range(a.lo >= 0, a.hi >= 0)


def _zero(a: Range) -> Range:
    if a.exact:
        return Range(a.lo == 0)
    return Range((a.lo == 0) & (a.hi == 0), (a.lo <= 0) & (a.hi >= 0))


def _less(a: Range, b: Range, or_equal: bool) -> Range:
    # written so that NaN bounds make the result unknown
    if or_equal:
        return _three(a.hi <= b.lo, ~(a.lo > b.hi))
    return _three(a.hi < b.lo, ~(a.lo >= b.hi))


def _equal(a: Range, b: Range) -> Range:
    if a is b:  # x == x: false only for NaN
        return _three(~np.isnan(a.lo), np.ones(np.shape(a.lo), bool))
    must = (a.lo == a.hi) & (b.lo == b.hi) & (a.lo == b.lo)
    return _three(must, ~((a.lo > b.hi) | (a.hi < b.lo)))


# ------------------------------------------------------------------------------------- logic


def _not(a: Range) -> Range:
    return Range(~a.lo) if a.exact else Range(~a.hi, ~a.lo)


def _combine(function: Callable[[Array, Array], Array], args: Sequence[Range]) -> Range:
    """A function that never decreases in any operand."""
    lo: Array = args[0].lo
    hi: Array = args[0].hi
    exact = all(a.exact for a in args)
    for a in args[1:]:
        lo = function(lo, a.lo)
        hi = lo if exact else function(hi, a.hi)
    return Range(lo) if exact else Range(lo, hi)


def _xor(a: Range, b: Range) -> Range:
    if a.exact and b.exact:
        return Range(a.lo ^ b.lo)
    return Range((a.lo & ~b.hi) | (~a.hi & b.lo), ~((a.lo & b.lo) | (~a.hi & ~b.hi)))


def _where(c: Range, a: Range, b: Range) -> Range:
    if c.exact:
        lo: Array = np.where(c.lo, a.lo, b.lo)
        return Range(lo) if a.exact and b.exact else Range(lo, np.where(c.lo, a.hi, b.hi))
    lo = np.where(c.lo, a.lo, np.where(c.hi, np.minimum(a.lo, b.lo), b.lo))
    return Range(lo, np.where(c.lo, a.hi, np.where(c.hi, np.maximum(a.hi, b.hi), b.hi)))


# ---------------------------------------------------------------------------------- dispatch


def _negate(a: Range) -> Range:
    return Range(-a.lo) if a.exact else Range(-a.hi, -a.lo)


_BY_NAME: dict[str, Callable[..., Range]] = {
    "add": lambda a, b: monotonic(np.add, a, b),
    "sub": lambda a, b: monotonic(np.subtract, a, b),
    "neg": _negate,
    "div": divide,
    "pow": power,
    "atan2": atan2,
    "abs": absolute,
    "ge0": _at_least_zero,
    "eq0": _zero,
    "le": lambda a, b: _less(a, b, True),
    "lt": lambda a, b: _less(a, b, False),
    "eq": _equal,
    "not": _not,
    "where": _where,
    "min": lambda *args: _combine(np.minimum, args),
    "max": lambda *args: _combine(np.maximum, args),
    "and": lambda *args: _combine(np.logical_and, args),
    "or": lambda *args: _combine(np.logical_or, args),
    "floordiv": floordiv,
}


def apply(op: str, kind: str, attr: Any, args: Sequence[Range]) -> Range:
    """The range of one operation, named as `primitives.expr.algebra` names them.

    Operations this file does not know give the range that says nothing, which is sound.
    """
    if op == "linear":
        coefficients, offset = attr
        return linear(list(zip(coefficients, args, strict=True)), offset)
    if op in _BY_NAME:
        return _BY_NAME[op](*args)
    if op == "mul":
        return product(args) if kind == "int" else multiply(*args)
    if op == "mod":
        return mod(*args) if kind == "int" else remainder(*args)
    if op == "xor":
        result = args[0]
        for a in args[1:]:
            result = _xor(result, a)
        return result
    if op in ("bitand", "bitor", "bitxor"):
        return bitwise(op, *args)
    if op in ("bitshl", "bitshr"):
        return shift(op, *args)
    if op in ("int", "float"):
        return cast(op, args[0])
    if kind == "float" and len(args) == 1:
        return unary(op, args[0])
    return unknown(kind, np.broadcast_shapes(*(np.shape(a.lo) for a in args)))
