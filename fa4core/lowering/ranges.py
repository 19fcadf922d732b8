"""Ranges of values and how every operation of the expression graph maps them.

A `Range` holds, elementwise, a lower and an upper bound of a value; where the value is known
exactly both are the same array, so that one set of rules serves boxes and single points.
The rules are sound: the value of the operation always lies in the result, whatever values the
operands take in theirs. This file has ranges and the rules of integers; `float_ranges` has those of
floats, `range_rules` the rest and the dispatch by name. Nothing here knows about attention.

* bool: three-valued, `[False, True]` is "unknown".
* int: int64, mathematical; `+-UNBOUNDED` (2^62) stands for "no bound known".
* float: float64 bounds rounded outwards to float32, so that they hold whether the mask is computed
  in float64 (the oracle) or in float32 (a kernel). NaN bounds stand for "anything, NaN included".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

UNBOUNDED = 1 << 62
_SAFE = float(1 << 61)  # estimates in float64 below this cannot hide an overflow

Array = Any  # np.ndarray or a numpy scalar; shapes broadcast


class Range:
    """Elementwise bounds `lo <= value <= hi`; `hi is lo` where the value is known exactly."""

    __slots__ = ("_magnitude", "hi", "lo")

    def __init__(self, lo: Array, hi: Array | None = None) -> None:
        self.lo = lo
        self.hi = lo if hi is None else hi
        self._magnitude: int | None = None

    @property
    def exact(self) -> bool:
        return self.hi is self.lo

    @property
    def magnitude(self) -> int:
        """The largest absolute value of an integer range, over all elements."""
        if self._magnitude is None:
            lo, hi = np.asarray(self.lo), np.asarray(self.hi)
            self._magnitude = max(-int(lo.min()), int(hi.max()), 0) if lo.size and hi.size else 0
        return self._magnitude

    @property
    def bounded(self) -> bool:
        return self.magnitude < UNBOUNDED


def constant(value: bool | int | float) -> Range:
    if isinstance(value, bool):
        return Range(np.bool_(value))
    if isinstance(value, int):
        return Range(np.int64(value)) if abs(value) < UNBOUNDED else unknown("int", ())
    return Range(np.float64(value))


def unknown(kind: str, shape: tuple[int, ...]) -> Range:
    """The range that says nothing."""
    if kind == "bool":
        return Range(np.zeros(shape, bool), np.ones(shape, bool))
    if kind == "int":
        return Range(np.full(shape, -UNBOUNDED), np.full(shape, UNBOUNDED))
    return Range(np.full(shape, np.nan), np.full(shape, np.nan))


def forget(result: Range, where: Array) -> Range:
    """`result`, with nothing known where the condition holds."""
    if not np.any(where):
        return result
    kind = {"b": "bool", "i": "int", "f": "float"}[np.asarray(result.lo).dtype.kind]
    nothing = unknown(kind, ())
    return Range(np.where(where, nothing.lo, result.lo), np.where(where, nothing.hi, result.hi))


def corners(operation: Callable[[Array, Array], Array], a: Range, b: Range) -> Range:
    """Bounds of an operation that is monotonic in each operand: its extremes are at corners."""
    if a.exact and b.exact:
        return Range(operation(a.lo, b.lo))
    values = [operation(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    lo = np.minimum(np.minimum(values[0], values[1]), np.minimum(values[2], values[3]))
    hi = np.maximum(np.maximum(values[0], values[1]), np.maximum(values[2], values[3]))
    return Range(lo, hi)


# ---------------------------------------------------------------------------------- integers


def size(a: Range) -> Array:
    """The largest absolute value, elementwise, in float64."""
    return np.maximum(np.abs(np.asarray(a.lo, float)), np.abs(np.asarray(a.hi, float)))


def _sum(terms: Sequence[tuple[int, Array]], offset: int) -> Array:
    """`offset + sum(c * x)`, without the passes over memory that 0 and 1 would cost."""
    terms = sorted(terms, key=lambda term: term[0] != 1)  # begin with a plain term if there is one
    total: Array = None
    for c, x in terms:
        if total is None:
            total = x if c == 1 else x * np.int64(c)
        elif c in (1, -1):
            total = total + x if c == 1 else total - x
        else:
            total = total + x * np.int64(c)
    return total + np.int64(offset) if offset else total


def linear(terms: Sequence[tuple[int, Range]], offset: int) -> Range:
    """`offset + sum(coefficient * term)`."""
    ends = [(c, *((r.lo, r.hi) if c > 0 else (r.hi, r.lo))) for c, r in terms]
    lo = _sum([(c, low) for c, low, _ in ends], offset)
    exact = all(r.exact for _, r in terms)
    result = Range(lo) if exact else Range(lo, _sum([(c, high) for c, _, high in ends], offset))
    if abs(offset) + sum(abs(c) * r.magnitude for c, r in terms) < UNBOUNDED:
        return result
    return forget(result, abs(float(offset)) + sum(abs(c) * size(r) for c, r in terms) >= _SAFE)


def _multiply(a: Range, b: Range) -> Range:
    result = corners(lambda x, y: x * y, a, b)
    if a.magnitude * b.magnitude < UNBOUNDED:
        return result
    return forget(result, size(a) * size(b) >= _SAFE)


def product(factors: Sequence[Range]) -> Range:
    """A product of integers; repeated factors (the same object) are powers."""
    result: Range | None = None
    for factor in dict.fromkeys(factors):
        times = sum(f is factor for f in factors)
        base = absolute(factor) if times % 2 == 0 else factor
        for _ in range(times):
            result = base if result is None else _multiply(result, base)
    assert result is not None
    return result


def unbounded_in(*operands: Range) -> Array:
    """Where a bound of any operand is unknown."""
    return np.logical_or.reduce(
        np.broadcast_arrays(*[size(a) >= float(UNBOUNDED) for a in operands])
    )


def floordiv(a: Range, b: Range) -> Range:
    """Division rounded towards minus infinity; nothing is known where the divisor may be 0."""
    zero = (b.lo <= 0) & (b.hi >= 0)
    if np.any(zero):
        one = np.int64(1)
        safe = Range(np.where(zero, one, b.lo), np.where(zero, one, b.hi))
        return forget(floordiv(a, safe), zero)
    if b.exact and np.ndim(b.lo) == 0:
        low, high = (a.lo, a.hi) if b.lo > 0 else (a.hi, a.lo)
        result = Range(low // b.lo) if a.exact else Range(low // b.lo, high // b.lo)
    else:
        result = corners(lambda x, y: x // y, a, b)
    return result if a.bounded and b.bounded else forget(result, unbounded_in(a, b))


def mod(a: Range, b: Range) -> Range:
    """Remainder with the sign of the divisor; nothing is known where the divisor may be 0."""
    zero = (b.lo <= 0) & (b.hi >= 0)
    if np.any(zero):
        one = np.int64(1)
        safe = Range(np.where(zero, one, b.lo), np.where(zero, one, b.hi))
        return forget(mod(a, safe), zero)
    if not (a.bounded and b.bounded):
        unsafe = unbounded_in(a, b)
        tame = Range(np.where(unsafe, 0, a.lo), np.where(unsafe, 0, a.hi))
        divisor = b if b.bounded else Range(np.where(unsafe, 1, b.lo), np.where(unsafe, 1, b.hi))
        return forget(mod(tame, divisor), unsafe)
    if b.exact:
        quotient = a.lo // b.lo
        low = a.lo - quotient * b.lo
        if a.exact:
            return Range(low)
        same = quotient == a.hi // b.lo
        high = a.hi - quotient * b.lo
        return Range(
            np.where(same, low, np.minimum(b.lo + 1, 0)),
            np.where(same, high, np.maximum(b.lo - 1, 0)),
        )
    inside = (a.lo >= 0) & (a.hi < b.lo)  # a % b is a
    lo = np.where(inside, a.lo, np.minimum(b.lo + 1, 0))
    hi = np.where(inside, a.hi, np.maximum(b.hi - 1, 0))
    return Range(lo, hi)


def absolute(a: Range) -> Range:
    if a.exact:
        return Range(np.abs(a.lo))
    return Range(np.maximum(np.maximum(a.lo, -a.hi), 0), np.maximum(-a.lo, a.hi))


def _filled(a: Array) -> Array:
    """The smallest 2^n - 1 that is at least `a` (for 0 <= a < 2^62)."""
    for shift in (1, 2, 4, 8, 16, 32):
        a = a | (a >> np.int64(shift))
    return a


def _is_low_bits(mask: int) -> bool:
    return mask >= 0 and mask & (mask + 1) == 0


def bitwise(op: str, a: Range, b: Range) -> Range:
    """`op` is "bitand", "bitor" or "bitxor"."""
    function = {"bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor}[op]
    if a.exact and b.exact:
        return Range(function(a.lo, b.lo))
    positive = (a.lo >= 0) & (b.lo >= 0)
    ceiling = _filled(np.maximum(np.maximum(a.hi, b.hi), 0))
    if op == "bitand":
        for value, mask in ((a, b), (b, a)):
            if mask.exact and np.ndim(mask.lo) == 0 and _is_low_bits(int(mask.lo)):
                return mod(value, Range(mask.lo + 1))  # x & (2^n - 1) is x % 2^n
        lo = np.where((a.lo >= 0) | (b.lo >= 0), 0, -UNBOUNDED)
        hi = np.where(b.lo >= 0, np.where(a.lo >= 0, np.minimum(a.hi, b.hi), b.hi), a.hi)
        return Range(lo, np.where((a.lo >= 0) | (b.lo >= 0), hi, UNBOUNDED))
    least: Array = np.maximum(a.lo, b.lo) if op == "bitor" else 0
    return Range(np.where(positive, least, -UNBOUNDED), np.where(positive, ceiling, UNBOUNDED))


def shift(op: str, a: Range, b: Range) -> Range:
    """`op` is "bitshl" or "bitshr"; nothing is known where a shift may be negative or above 61."""
    legal = (b.lo >= 0) & (b.hi < 62)
    count = Range(np.clip(b.lo, 0, 61), None if b.exact else np.clip(b.hi, 0, 61))
    if op == "bitshl":
        powers = Range(np.int64(1) << count.lo, None if b.exact else np.int64(1) << count.hi)
        return forget(_multiply(a, powers), ~legal)
    result = corners(lambda x, y: x >> y, a, count)
    return forget(result, ~legal if a.bounded else ~legal | unbounded_in(a))
