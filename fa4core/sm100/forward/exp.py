"""exp2 of a row's scores by policy: MUFU, a polynomial on FMA units, or a mix.

The polynomial is `fa4core.reference.exp2`'s: Cody-Waite range reduction to [0, 1), Horner's rule
with constant term 1, the integer part added to the exponent (FlashAttention-4, section 3.1).
"""

from __future__ import annotations

import math

import cutlass
from cutlass import cute

from fa4core.lowering.cute import select
from fa4core.reference.exp2 import COEFFICIENTS
from fa4core.sm100.forward.spec import Spec


def emulated(key: int, fraction: float) -> bool:
    """Whether the exponential of a key is computed by the polynomial.

    The same rule as the reference's, by the key's index in its block: 128 times the fraction is
    whole for the fractions in use, so that blocks agree with the row.
    """
    return math.floor((key + 1) * fraction) > math.floor(key * fraction)


def polynomial_exp2(x: cutlass.Float32, degree: int) -> cutlass.Float32:
    """2^x; 0 below -127."""
    x = cute.arch.fmax(x, cutlass.Float32(-127.0))
    whole = cute.math.floor(x)
    fraction = x - whole
    p = cutlass.Float32(0.0)
    for coefficient in reversed(COEFFICIENTS[degree]):
        p = (p + cutlass.Float32(coefficient)) * fraction
    p = p + cutlass.Float32(1.0)
    bits = p.bitcast(cutlass.Int32) + (cutlass.Int32(whole) << 23)
    return select(whole == -127.0, 0.0, bits.bitcast(cutlass.Float32), "float")


def exp2_row(
    spec: Spec,
    scores: cute.Tensor,
    weights: cute.Tensor,
    first: int,
    factor: cutlass.Float32,
    shift: cutlass.Float32,
) -> cutlass.Float32:
    """weights[i] = 2^(factor * scores[first + i] - shift); gives their sum."""
    total = None
    for i in range(cute.size(weights)):
        x = scores[first + i] * factor - shift
        if emulated(first + i, spec.exp.fraction):
            weight = polynomial_exp2(x, spec.exp.degree)
        else:
            weight = cute.math.exp2(x, fastmath=True)
        weights[i] = weight
        total = weight if total is None else total + weight
    return total
