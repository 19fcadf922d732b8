"""Rules of floating-point operations on ranges; see `ranges` for what a range promises."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from fa4core.lowering.ranges import Array, Range, absolute, corners, forget, unknown


def _float32_below(x: Array) -> Array:
    x = np.asarray(x, np.float64)
    near = x.astype(np.float32)
    below = np.nextafter(near, np.float32(-np.inf)).astype(np.float64)
    near = near.astype(np.float64)
    return np.where(near > x, below, near)


def rounded(lo: Array, hi: Array) -> Range:
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


def approximate(lo: Array, hi: Array) -> Range:
    """As `rounded`, for functions that libraries approximate to within a few units."""
    lo, hi = np.asarray(lo, np.float64), np.asarray(hi, np.float64)
    margin = 2.0**-20
    return rounded(lo - np.abs(lo) * margin - 1e-37, hi + np.abs(hi) * margin + 1e-37)


def monotonic(operation: Callable[[Array, Array], Array], a: Range, b: Range) -> Range:
    result = corners(operation, a, b)
    return rounded(result.lo, result.hi)


def multiply(a: Range, b: Range) -> Range:
    """A product; 0 times infinity is NaN even where the 0 lies inside a range."""
    result = monotonic(np.multiply, a, b)
    if np.any(np.isinf(result.lo)) or np.any(np.isinf(result.hi)):
        for x, y in ((a, b), (b, a)):
            zero = (x.lo <= 0) & (x.hi >= 0)
            result = forget(result, zero & (np.isinf(y.lo) | np.isinf(y.hi)))
    return result


def divide(a: Range, b: Range) -> Range:
    result = monotonic(np.divide, a, b)
    return result if b.exact else forget(result, (b.lo <= 0) & (b.hi >= 0))


def remainder(a: Range, b: Range) -> Range:
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
    return forget(rounded(lo, hi), ~(known & np.isfinite(a.lo) & np.isfinite(a.hi)))


def power(a: Range, b: Range) -> Range:
    if a.exact and b.exact:
        value = np.power(a.lo, b.lo)
        return approximate(value, value)
    result = corners(np.power, a, b)
    return forget(approximate(result.lo, result.hi), ~(a.lo > 0))


def atan2(a: Range, b: Range) -> Range:
    if a.exact and b.exact:
        value = np.arctan2(a.lo, b.lo)
        return approximate(value, value)
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
        return approximate(_INCREASING[op](a.lo), _INCREASING[op](a.hi))
    if op in _DECREASING:
        return approximate(_DECREASING[op](a.hi), _DECREASING[op](a.lo))
    if op == "rsqrt":
        return forget(approximate(1 / np.sqrt(a.hi), 1 / np.sqrt(a.lo)), ~(a.lo >= 0))
    if op == "cosh":
        size = absolute(a)
        return approximate(np.cosh(size.lo), np.cosh(size.hi))
    if op in _PERIODIC:
        # float32 rounding of a large argument shifts the phase: only small ones are evaluated
        known = (a.lo == a.hi) & (np.abs(a.lo) < 2.0**24)
        value = _PERIODIC[op](a.lo)
        result = approximate(value, value)
        limit = np.inf if op == "tan" else 1.0
        loose = np.where(np.isfinite(a.lo) & np.isfinite(a.hi), limit, np.nan)
        return Range(np.where(known, result.lo, -loose), np.where(known, result.hi, loose))
    shape = np.broadcast_shapes(np.shape(a.lo), np.shape(a.hi))
    return unknown("float", shape)
