"""Ranges of values and how every operation of the expression graph maps them.

A `Range` holds, elementwise, a lower and an upper bound of a value; where the value is known exactly
both are the same array, so that one set of rules serves boxes of many elements and single points.
The rules are sound: the value of the operation always lies in the result, whatever values the
operands take in theirs. `bounds` applies them to graphs; nothing here knows about attention.

* bool: three-valued, `[False, True]` is "unknown".
* int: int64, mathematical; `+-UNBOUNDED` (2^62) stands for "no bound known".
* float: float64 bounds rounded outwards to float32, so that they hold whether the mask is computed
  in float64 (the oracle) or in float32 (a kernel). NaN bounds stand for "anything, NaN included".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

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


def _corners(operation: Callable[[Array, Array], Array], a: Range, b: Range) -> Range:
    """Bounds of an operation that is monotonic in each operand: its extremes are at corners."""
    if a.exact and b.exact:
        return Range(operation(a.lo, b.lo))
    values = [operation(x, y) for x in (a.lo, a.hi) for y in (b.lo, b.hi)]
    lo = np.minimum(np.minimum(values[0], values[1]), np.minimum(values[2], values[3]))
    hi = np.maximum(np.maximum(values[0], values[1]), np.maximum(values[2], values[3]))
    return Range(lo, hi)


# ---------------------------------------------------------------------------------- integers


def _size(a: Range) -> Array:
    return np.maximum(np.abs(np.asarray(a.lo, float)), np.abs(np.asarray(a.hi, float)))


def linear(terms: Sequence[tuple[int, Range]], offset: int) -> Range:
    """`offset + sum(coefficient * term)`."""
    lo: Array = np.int64(offset)
    hi: Array = np.int64(offset)
    exact = all(r.exact for _, r in terms)
    for c, r in terms:
        low, high = (r.lo, r.hi) if c > 0 else (r.hi, r.lo)
        lo = lo + low if c == 1 else lo - low if c == -1 else lo + low * np.int64(c)
        if not exact:
            hi = hi + high if c == 1 else hi - high if c == -1 else hi + high * np.int64(c)
    result = Range(lo) if exact else Range(lo, hi)
    if abs(offset) + sum(abs(c) * r.magnitude for c, r in terms) < UNBOUNDED:
        return result
    return forget(result, abs(float(offset)) + sum(abs(c) * _size(r) for c, r in terms) >= _SAFE)


def _multiply(a: Range, b: Range) -> Range:
    result = _corners(lambda x, y: x * y, a, b)
    if a.magnitude * b.magnitude < UNBOUNDED:
        return result
    return forget(result, _size(a) * _size(b) >= _SAFE)


def _product(factors: Sequence[Range]) -> Range:
    """A product of integers; repeated factors (the same object) are powers."""
    result: Range | None = None
    for factor in dict.fromkeys(factors):
        times = sum(f is factor for f in factors)
        base = absolute(factor) if times % 2 == 0 else factor
        for _ in range(times):
            result = base if result is None else _multiply(result, base)
    assert result is not None
    return result


def _unbounded_in(*operands: Range) -> Array:
    return np.logical_or.reduce(
        np.broadcast_arrays(*[_size(a) >= float(UNBOUNDED) for a in operands])
    )


def _floordiv(a: Range, b: Range) -> Range:
    zero = (b.lo <= 0) & (b.hi >= 0)
    if np.any(zero):
        one = np.int64(1)
        safe = Range(np.where(zero, one, b.lo), np.where(zero, one, b.hi))
        return forget(_floordiv(a, safe), zero)
    if b.exact and np.ndim(b.lo) == 0:
        low, high = (a.lo, a.hi) if b.lo > 0 else (a.hi, a.lo)
        result = Range(low // b.lo) if a.exact else Range(low // b.lo, high // b.lo)
    else:
        result = _corners(lambda x, y: x // y, a, b)
    return result if a.bounded and b.bounded else forget(result, _unbounded_in(a, b))


def _mod(a: Range, b: Range) -> Range:
    zero = (b.lo <= 0) & (b.hi >= 0)
    if np.any(zero):
        one = np.int64(1)
        safe = Range(np.where(zero, one, b.lo), np.where(zero, one, b.hi))
        return forget(_mod(a, safe), zero)
    if not (a.bounded and b.bounded):
        unsafe = _unbounded_in(a, b)
        tame = Range(np.where(unsafe, 0, a.lo), np.where(unsafe, 0, a.hi))
        divisor = b if b.bounded else Range(np.where(unsafe, 1, b.lo), np.where(unsafe, 1, b.hi))
        return forget(_mod(tame, divisor), unsafe)
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


def _bitwise(op: str, a: Range, b: Range) -> Range:
    function = {"bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor}[op]
    if a.exact and b.exact:
        return Range(function(a.lo, b.lo))
    positive = (a.lo >= 0) & (b.lo >= 0)
    ceiling = _filled(np.maximum(np.maximum(a.hi, b.hi), 0))
    if op == "bitand":
        for value, mask in ((a, b), (b, a)):
            if mask.exact and np.ndim(mask.lo) == 0 and _is_low_bits(int(mask.lo)):
                return _mod(value, Range(mask.lo + 1))  # x & (2^n - 1) is x % 2^n
        lo = np.where((a.lo >= 0) | (b.lo >= 0), 0, -UNBOUNDED)
        hi = np.where(b.lo >= 0, np.where(a.lo >= 0, np.minimum(a.hi, b.hi), b.hi), a.hi)
        return Range(lo, np.where((a.lo >= 0) | (b.lo >= 0), hi, UNBOUNDED))
    lo = np.maximum(a.lo, b.lo) if op == "bitor" else 0
    return Range(np.where(positive, lo, -UNBOUNDED), np.where(positive, ceiling, UNBOUNDED))


def _shift(op: str, a: Range, b: Range) -> Range:
    legal = (b.lo >= 0) & (b.hi < 62)
    count = Range(np.clip(b.lo, 0, 61), None if b.exact else np.clip(b.hi, 0, 61))
    if op == "bitshl":
        powers = Range(np.int64(1) << count.lo, None if b.exact else np.int64(1) << count.hi)
        return forget(_multiply(a, powers), ~legal)
    result = _corners(lambda x, y: x >> y, a, count)
    return forget(result, ~legal if a.bounded else ~legal | _unbounded_in(a))


# ------------------------------------------------------------------------------------ floats


def _float32_below(x: Array) -> Array:
    x = np.asarray(x, np.float64)
    near = x.astype(np.float32)
    below = np.nextafter(near, np.float32(-np.inf)).astype(np.float64)
    near = near.astype(np.float64)
    return np.where(near > x, below, near)


def _rounded(lo: Array, hi: Array) -> Range:
    """Bounds of a correctly rounded float operation whose real bounds are `lo` and `hi`.

    Rounding is monotonic, so bounds that float32 can represent hold in either precision; others
    move outwards to the next float32.
    """
    low = _float32_below(lo)
    if hi is lo and np.array_equal(low, lo):
        return Range(low)
    high = -_float32_below(-np.asarray(hi))
    lost = np.isnan(low) | np.isnan(high)
    if np.any(lost):
        low, high = np.where(lost, np.nan, low), np.where(lost, np.nan, high)
    return Range(low, high)


def _approximate(lo: Array, hi: Array) -> Range:
    """As `_rounded`, for functions that libraries approximate to within a few units."""
    lo, hi = np.asarray(lo, np.float64), np.asarray(hi, np.float64)
    margin = 2.0**-20
    return _rounded(lo - np.abs(lo) * margin - 1e-37, hi + np.abs(hi) * margin + 1e-37)


def _float_corners(operation: Callable[[Array, Array], Array], a: Range, b: Range) -> Range:
    result = _corners(operation, a, b)
    return _rounded(result.lo, result.hi)


def _divide(a: Range, b: Range) -> Range:
    result = _float_corners(lambda x, y: np.divide(x, y), a, b)
    return result if b.exact else forget(result, (b.lo <= 0) & (b.hi >= 0))


def _float_mod(a: Range, b: Range) -> Range:
    """`a % b` with the sign of b. Near a multiple of b the result may fall on either side."""
    slack = np.maximum(np.abs(a.lo), np.abs(a.hi)) * 2.0**-20
    first, last = np.floor((a.lo - slack) / b.lo), np.floor((a.hi + slack) / b.lo)
    known = (b.lo == b.hi) & (b.lo > 0)
    inside = known & (first == last)
    lo = np.where(inside, np.mod(a.lo, b.lo) - slack, 0.0)
    hi = np.where(inside, np.mod(a.hi, b.lo) + slack, b.hi)
    if a.exact and b.exact:  # exact operands far below 2^24 b: the remainder is exact
        sharp = known & (np.mod(a.lo, 1) == 0) & (np.mod(b.lo, 1) == 0) & (np.abs(a.lo) < 2.0**24)
        lo, hi = np.where(sharp, np.mod(a.lo, b.lo), lo), np.where(sharp, np.mod(a.lo, b.lo), hi)
    return forget(_rounded(lo, hi), ~known)


def _power(a: Range, b: Range) -> Range:
    if a.exact and b.exact:
        value = np.power(a.lo, b.lo)
        return _approximate(value, value)
    result = _corners(np.power, a, b)
    return forget(_approximate(result.lo, result.hi), ~(a.lo > 0))


def _atan2(a: Range, b: Range) -> Range:
    if a.exact and b.exact:
        value = np.arctan2(a.lo, b.lo)
        return _approximate(value, value)
    bound = np.full(np.broadcast_shapes(np.shape(a.lo), np.shape(b.lo)), 3.1416)
    return forget(Range(-bound, bound), np.isnan(a.lo) | np.isnan(b.lo))


def _by_torch(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Array], Array]:
    return lambda x: function(torch.from_numpy(np.array(x, np.float64))).numpy()


#: Functions that never decrease; the second group rounds to integers and is exact.
_INCREASING: dict[str, Callable[[Array], Array]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "sqrt": np.sqrt,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sinh": np.sinh,
    "asin": np.arcsin,
    "atan": np.arctan,
    "erf": _by_torch(torch.erf),
}
_STEPS: dict[str, Callable[[Array], Array]] = {
    "floor": np.floor,
    "ceil": np.ceil,
    "trunc": np.trunc,
    "round": np.rint,
    "sign": np.sign,
}
_DECREASING: dict[str, Callable[[Array], Array]] = {
    "acos": np.arccos,
    "erfc": _by_torch(torch.erfc),
}
_PERIODIC: dict[str, Callable[[Array], Array]] = {"sin": np.sin, "cos": np.cos, "tan": np.tan}


def unary(op: str, a: Range) -> Range:
    """A float function of one argument."""
    if op in _STEPS:
        low = _STEPS[op](a.lo)
        return Range(low) if a.exact else Range(low, _STEPS[op](a.hi))
    if op in _INCREASING:
        return _approximate(_INCREASING[op](a.lo), _INCREASING[op](a.hi))
    if op in _DECREASING:
        return _approximate(_DECREASING[op](a.hi), _DECREASING[op](a.lo))
    if op == "rsqrt":
        return forget(_approximate(1 / np.sqrt(a.hi), 1 / np.sqrt(a.lo)), ~(a.lo >= 0))
    if op == "cosh":
        size = absolute(a)
        return _approximate(np.cosh(size.lo), np.cosh(size.hi))
    if op in _PERIODIC:
        # float32 rounding of a large argument shifts the phase: only small ones are evaluated
        known = (a.lo == a.hi) & (np.abs(a.lo) < 2.0**24)
        value = _PERIODIC[op](a.lo)
        result = _approximate(value, value)
        limit = np.inf if op == "tan" else 1.0
        loose = np.where(np.isfinite(a.lo) & np.isfinite(a.hi), limit, np.nan)
        return Range(np.where(known, result.lo, -loose), np.where(known, result.hi, loose))
    shape = np.broadcast_shapes(np.shape(a.lo), np.shape(a.hi))
    return unknown("float", shape)


# ------------------------------------------------------------------------- casts, comparisons


def cast(kind: str, a: Range) -> Range:
    source = np.asarray(a.lo).dtype.kind
    if kind == "float":
        lo, hi = np.asarray(a.lo, np.float64), np.asarray(a.hi, np.float64)
        if source == "i" and not a.bounded:
            hidden = _unbounded_in(a)
            return forget(_rounded(lo, hi), hidden)
        return _rounded(lo, lo if a.exact else hi)
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
    lo, hi = args[0].lo, args[0].hi
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
        lo = np.where(c.lo, a.lo, b.lo)
        return Range(lo) if a.exact and b.exact else Range(lo, np.where(c.lo, a.hi, b.hi))
    lo = np.where(c.lo, a.lo, np.where(c.hi, np.minimum(a.lo, b.lo), b.lo))
    return Range(lo, np.where(c.lo, a.hi, np.where(c.hi, np.maximum(a.hi, b.hi), b.hi)))


# ---------------------------------------------------------------------------------- dispatch


def _negate(a: Range) -> Range:
    return Range(-a.lo) if a.exact else Range(-a.hi, -a.lo)


_BY_NAME: dict[str, Callable[..., Range]] = {
    "add": lambda a, b: _float_corners(np.add, a, b),
    "sub": lambda a, b: _float_corners(np.subtract, a, b),
    "neg": _negate,
    "div": _divide,
    "pow": _power,
    "atan2": _atan2,
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
    "floordiv": _floordiv,
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
        return _product(args) if kind == "int" else _float_corners(np.multiply, *args)
    if op == "mod":
        return _mod(*args) if kind == "int" else _float_mod(*args)
    if op == "xor":
        result = args[0]
        for a in args[1:]:
            result = _xor(result, a)
        return result
    if op in ("bitand", "bitor", "bitxor"):
        return _bitwise(op, *args)
    if op in ("bitshl", "bitshr"):
        return _shift(op, *args)
    if op in ("int", "float"):
        return cast(op, args[0])
    if kind == "float" and len(args) == 1:
        return unary(op, args[0])
    return unknown(kind, np.broadcast_shapes(*(np.shape(a.lo) for a in args)))


def width(a: Range) -> float:
    """The largest distance between the bounds, for tests; infinite where nothing is known."""
    gap = np.asarray(a.hi, float) - np.asarray(a.lo, float)
    return math.inf if np.isnan(gap).any() else float(gap.max(initial=0.0))
