"""exp2 by policy: by hardware, by a polynomial on FMA units, or a mix of the two.

The polynomial follows FlashAttention-4 (section 3.1): Cody-Waite range reduction to [0, 1),
Horner's rule with p0 = 1, and the integer part added to the exponent bits. Used by the tiled
reference, so that a policy's error is seen on a CPU before a kernel has it.
"""

from __future__ import annotations

from typing import Any

import torch

from primitives.exp import Exp

Tensor = torch.Tensor

#: Coefficients c1..cn of 1 + c1 f + ... + cn f^n, an approximation of 2^f on [0, 1), by degree.
#: Minimax in the relative error with c0 = 1 (Lawson's iteration on 4,001 Chebyshev nodes, in
#: float64); degree 3 is the one FlashAttention-4 uses.
COEFFICIENTS: tuple[tuple[float, ...], ...] = (
    (),
    (0.9235568231959231,),
    (0.6659609152586728, 0.3299324502631798),
    (0.69514614, 0.22756439, 0.07711909),
    (0.6930448448008035, 0.24128020556096652, 0.05224247249260583, 0.013426685349447718),
    (
        0.6931513118087488,
        0.24016445010438975,
        0.05579991328900861,
        0.009017030063051669,
        0.001867130192427907,
    ),
    (
        0.6931470444431861,
        0.2402293055546389,
        0.055485280605506164,
        0.00967545159752407,
        0.0012467846128139308,
        0.00021612916166156423,
    ),
)

#: Largest relative error of each degree on [0, 1) in exact arithmetic; float32 adds about 1.2e-7.
MAX_ERROR = (0.5, 3.83e-2, 2.06e-3, 8.82e-5, 2.90e-6, 8.23e-8, 2.02e-9)


def polynomial_exp2(x: Tensor, degree: int) -> Tensor:
    """2^x by range reduction and a polynomial of `degree`, as the kernels compute it.

    Args:
        x: float32 or float64. Below -127 the result is 0; NaN stays NaN.
        degree: 0 to 6.
    """
    x = x.clamp(min=-127.0)
    whole = torch.floor(x)
    fraction = x - whole
    p = fraction * 0.0  # not zeros: a NaN must stay one, in degree 0 too
    for coefficient in reversed(COEFFICIENTS[degree]):
        p = (p + coefficient) * fraction
    p = p + 1.0
    if x.dtype == torch.float64:
        return torch.where(whole == -127.0, 0.0, torch.ldexp(p, whole))
    bits = p.view(torch.int32) + (whole.to(torch.int32) << 23)
    return torch.where(whole == -127.0, 0.0, bits.view(torch.float32))


def emulated(keys: Tensor | int, fraction: float) -> Any:
    """Which keys of a row have their exponential emulated: every (1 / fraction)-th pair.

    Args:
        keys: (w,) key indices, or one. Keys 0 and 1 are a pair, and so on: kernels compute two
            elements with one packed instruction.

    Returns:
        (w,) bool, or one.
    """
    pairs = keys // 2
    return (pairs + 1) * fraction // 1 > pairs * fraction // 1


def exp2(x: Tensor, policy: Exp, keys: Tensor) -> Tensor:
    """2^x, overwriting `x` where that saves a copy.

    Args:
        x: (..., w) float32 or float64.
        policy: Who computes which exponentials.
        keys: (w,) key index of each column.
    """
    if policy.fraction == 1.0:
        return polynomial_exp2(x, policy.degree)
    if policy.fraction == 0.0:
        return x.exp2_()
    columns = emulated(keys, policy.fraction).nonzero().squeeze(-1)
    by_polynomial = polynomial_exp2(x[..., columns], policy.degree)
    x = x.exp2_()
    x[..., columns] = by_polynomial
    return x
