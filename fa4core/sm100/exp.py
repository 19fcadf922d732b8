"""exp2 of scores by policy: MUFU, a polynomial on FMA units, or a mix.

Everything goes two elements of a row at a time, as the packed instructions do. The polynomial is
`fa4core.reference.exp2`'s: Cody-Waite range reduction to [0, 1), Horner's rule with constant term
1, the integer part added to the exponent (FlashAttention-4, section 3.1).
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute

from fa4core.reference.exp2 import COEFFICIENTS, emulated
from fa4core.spec import KernelSpec

Pair = tuple[Any, Any]

ROUNDS_TO_ONE = float(2**23 + 2**22)  # float32 around it has a spacing of 1


def both(value: float) -> Pair:
    return cutlass.Float32(value), cutlass.Float32(value)


def polynomial_exp2(x: Pair, degree: int) -> Pair:
    """2^x; 0 below -127, and down to -126 of a magnitude below 2^-126. NaN gives NaN or 2^128."""
    fma, add = cute.arch.fma_packed_f32x2, cute.arch.add_packed_f32x2
    x = tuple(cute.arch.fmax(n, cutlass.Float32(-127.0), nan=True) for n in x)
    shifted = add(x, both(ROUNDS_TO_ONE), rnd="rm")  # its last bits are the integer part of x
    fraction = cute.arch.sub_packed_f32x2(x, add(shifted, both(-ROUNDS_TO_ONE)))
    coefficients = (1.0, *COEFFICIENTS[degree])
    p = both(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        p = fma(p, fraction, both(coefficient))
    bits = (p[n].bitcast(cutlass.Int32) + (shifted[n].bitcast(cutlass.Int32) << 23) for n in (0, 1))
    return tuple(b.bitcast(cutlass.Float32) for b in bits)


def exp2_pair(spec: KernelSpec, i: int, x: Pair) -> Pair:
    """2^x of elements `i` and `i + 1` of a row."""
    if emulated(i, spec.exp.fraction):
        return polynomial_exp2(x, spec.exp.degree)
    return tuple(cute.math.exp2(n, fastmath=True) for n in x)


def exp2_row(
    spec: KernelSpec,
    scores: cute.Tensor,
    weights: cute.Tensor,
    keys: range,
    factor: cutlass.Float32,
    shifts: Pair,
) -> None:
    """weights[i] = 2^(factor * scores[i] - shift) for the keys, whose number is even.

    Shifts are of even and of odd keys."""
    for i in keys[::2]:
        pair = scores[i], scores[i + 1]
        x = cute.arch.fma_packed_f32x2(pair, (factor, factor), (-shifts[0], -shifts[1]))
        weights[i], weights[i + 1] = exp2_pair(spec, i, x)
