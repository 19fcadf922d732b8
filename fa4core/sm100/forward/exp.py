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

    The reference's rule with the key's index in its block for that in the row: the share is the
    same, and which keys they are too if 128 times the fraction is whole.
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
    """weights[i] = 2^(factor * scores[first + i] - shift); gives their sum.

    Two elements at a time where the hardware has packed instructions.
    """
    total = (cutlass.Float32(0.0), cutlass.Float32(0.0))
    for i in range(0, cute.size(weights), 2):
        pair = scores[first + i], scores[first + i + 1]
        x = cute.arch.fma_packed_f32x2(pair, (factor, factor), (-shift, -shift))
        both = tuple(_exp2(spec, x[n], first + i + n) for n in range(2))
        weights[i], weights[i + 1] = both
        total = cute.arch.add_packed_f32x2(total, both)
    return total[0] + total[1]


def _exp2(spec: Spec, x: cutlass.Float32, key: int) -> cutlass.Float32:
    if emulated(key, spec.exp.fraction):
        return polynomial_exp2(x, spec.exp.degree)
    return cute.math.exp2(x, fastmath=True)
