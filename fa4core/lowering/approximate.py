"""Quick forms of the transcendental functions of score mods: on MUFU, or on FMA units.

Both kinds of units work at once, so a row gives a share of its elements to each (`primitives.exp`
says how large). Errors are relative, of the function, and below the rounding of scores to bfloat16
(2^-9); `fa4core.testing.dense` allows them. Masks don't use these: a comparison must not turn out
differently. Used by `cute`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import cutlass
from cutlass import cute
from cutlass.cute import math as device

from fa4core.reference.exp2 import COEFFICIENTS

Unit = Literal["mufu", "fma"]
LOG2E = math.log2(math.e)
EXP2 = COEFFICIENTS[3]
ROUNDS_TO_ONE = float(2**23 + 2**22)  # float32 around it has a spacing of 1
ONE = 127 << 23  # the bits of 1.0

#: tanh(x) = z p(z^2) with z = x / TANH_END in [-1, 1] and 1 beyond. Minimax in the relative error
#: (Lawson's iteration on 800 Chebyshev nodes, in float64); 4.9e-4, and 6.6e-4 in float32.
TANH_END = 3.82
TANH = (
    3.818152666091919, -18.182056427001953, 92.86555480957031, -375.3589172363281,
    1079.8565673828125, -2102.2548828125, 2675.640380859375, -2120.75048828125, 947.0,
    -181.63482666015625,
)  # fmt: skip


def tanh(x: Any, unit: Unit) -> Any:
    """By MUFU with an error of at most 2^-11 (PTX ISA, tanh.approx.f32), by FMA 6.6e-4."""
    if unit == "mufu":
        return device.tanh(x, fastmath=True)
    z = cute.arch.fmin(x * (1 / TANH_END), 1.0, abs=True, nan=True)  # smaller magnitude, sign of x
    square = z * z
    p = square * TANH[-1] + TANH[-2]
    for coefficient in reversed(TANH[:-2]):
        p = p * square + coefficient
    return p * z


def sigmoid(x: Any, unit: Unit) -> Any:
    """exp2 and a reciprocal of MUFU, error 2^-21 or exp2's: through tanh small values would lose
    their digits."""
    return cute.arch.rcp_approx(exp2(x * -LOG2E, unit) + 1.0)


def exp(x: Any, unit: Unit) -> Any:
    return exp2(x * LOG2E, unit)


def exp2(x: Any, unit: Unit) -> Any:
    """By MUFU with an error of 2^-22. By FMA 8.9e-5, or 2^-126 where that is more: the polynomial
    of degree 3 of the softmax (`fa4core.reference.exp2`), in scalar instructions, which round to
    nearest: the fraction is in [0, 1], both ends included. NaN stays NaN."""
    if unit == "mufu":
        return device.exp2(x, fastmath=True)
    x = cute.arch.fmax(x, -126.5, nan=True)  # gives 0
    x = cute.arch.fmin(x, 128.0, nan=True)  # gives infinity
    shifted = (x - 0.5) + ROUNDS_TO_ONE  # its last bits are the integer part of x
    fraction = x - (shifted - ROUNDS_TO_ONE)
    p = fraction * EXP2[-1] + EXP2[-2]
    for coefficient in (*reversed(EXP2[:-2]), 1.0):
        p = p * fraction + coefficient
    power = (shifted.bitcast(cutlass.Int32) << 23) + ONE
    return p * power.bitcast(cutlass.Float32)


QUICK: dict[str, Callable[[Any, Unit], Any]] = {
    "tanh": tanh,
    "sigmoid": sigmoid,
    "exp": exp,
    "exp2": exp2,
}
