"""Statistics of the two rows that a consumer thread shares with three others, and their exp2."""

from __future__ import annotations

import functools
import math
from typing import Any

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass._mlir.dialects import math as mlir_math
from cutlass.cutlass_dsl import T, dsl_user_op

from fa4core.forward.exponent import exponent, near
from fa4core.lowering.cute import select
from fa4core.reference.exp2 import COEFFICIENTS
from fa4core.sm90.forward.spec import Spec

NEVER = -math.inf
HALVES = (0, 1)  # the rows of a thread: r and r + 8
maximum = functools.partial(cute.arch.fmax, nan=True)  # NaN if either is
ROUNDER = 1.5 * 2.0**23  # added to a float32, it leaves an integer in the low bits


def half_of(accumulator: cute.Tensor, half: int) -> cute.Tensor:
    """One of the two rows of a thread's accumulator: pairs of columns, 4 registers apart."""
    pairs = cute.size(accumulator) // 4
    return cute.make_tensor(
        accumulator.iterator + 2 * half, cute.make_layout((2, pairs), stride=(1, 4))
    )


def over_quad(value: Any, function: Any) -> Any:
    """Combine the values of the four threads that share a row."""
    for distance in (1, 2):
        value = function(value, cute.arch.shuffle_sync_bfly(value, offset=distance))
    return value


class Rows:
    """Statistics of a thread's rows, of scores before `factor` takes them to the log2 domain.

    Rescaling is lazy (FlashAttention-4, section 3.1): `applied` is the maximum that P, the sum and
    O are relative to; it follows the true one only when that has grown by more than the threshold.
    Sums and true maxima are over the thread's own columns until the end.
    """

    def __init__(self, spec: Spec, factor: Any, values: list | None = None):
        self.spec, self.factor = spec, factor
        never, zero = cutlass.Float32(NEVER), cutlass.Float32(0.0)
        values = [never, never, never, never, zero, zero] if values is None else values
        self.applied, self.highest, self.total = values[:2], values[2:4], values[4:]

    def _numbers(self) -> list:
        return [*self.applied, *self.highest, *self.total]

    def __extract_mlir_values__(self) -> list:
        return [v for n in self._numbers() for v in n.__extract_mlir_values__()]

    def __new_from_mlir_values__(self, values: list) -> Rows:
        numbers = zip(self._numbers(), values, strict=True)
        return Rows(self.spec, self.factor, [n.__new_from_mlir_values__([v]) for n, v in numbers])

    def outgrown(self, sums: tuple) -> Any:
        """Whether the maximum of a row of this warp may have grown by more than the threshold.

        No term of a sum of at most 2^threshold is greater than that; no maximum has to be found to
        see it. Sums that are infinite or no number count as greater, and nothing is known of a row
        that has not seen a score, or whose scores are so large that weights need exact exponents.
        """
        most = 2.0**self.spec.threshold
        known = [
            (total <= most) & near(self.spec, applied * self.factor)
            for total, applied in zip(sums, self.applied, strict=True)
        ]
        return cute.arch.vote_all_sync(known[0] & known[1]) ^ True

    def see(self, peaks: tuple) -> None:
        """Take in the maxima of a block, if they are wanted for themselves."""
        if not self.spec.row_max:
            return
        self.highest = [
            maximum(highest, peak) for highest, peak in zip(self.highest, peaks, strict=True)
        ]

    def raise_maximum(self, peaks: tuple) -> tuple:
        """Take in the maxima of a block; gives the factors for what was accumulated before."""
        return tuple(self._raise(half, peaks[half]) for half in HALVES)

    def _raise(self, half: int, peak: Any) -> Any:
        highest = over_quad(maximum(self.highest[half], peak), maximum)
        growth = (highest - self.applied[half]) * self.factor
        grown = growth > self.spec.threshold  # false for -inf - -inf and NaN
        applied = select(grown, highest, self.applied[half], "float")
        shrink = cute.math.exp2(select(grown, -growth, 0.0, "float"), fastmath=True)
        self.highest[half], self.applied[half] = highest, applied
        self.total[half] = self.total[half] * shrink
        return shrink

    def add(self, amounts: tuple) -> None:
        self.total = [total + amount for total, amount in zip(self.total, amounts, strict=True)]

    def exponent(self, half: int, exact: bool) -> tuple[Any, Any]:
        """Factor and shift of a score on its way to a weight's exponent.

        The exact ones are right for scores of any magnitude; see `outgrown` for when the others are
        not, which need fewer registers.
        """
        if exact:
            return exponent(self.spec, self.applied[half], self.factor)
        return self.factor, self.applied[half] * self.factor


def exp2_block(
    spec: Spec, scores: cute.Tensor, weights: cute.Tensor, rows: Rows, exact: bool
) -> tuple:
    """weights[i] = 2^(factor * scores[i] - shift), both of its row; gives the sums of both rows.

    A share of the exponentials is a polynomial's; it is a share of each thread's columns, and so of
    each row's.
    """
    exponents = [rows.exponent(half, exact) for half in HALVES]
    sums = [[cutlass.Float32(0.0) for _ in range(2)] for _ in HALVES]
    for i in range(cute.size(scores)):
        half, column = i // 2 % 2, i // 4 * 2 + i % 2
        factor, shift = exponents[half]
        x = fma(scores[i], factor, -shift)
        if math.floor((column + 1) * spec.exp.fraction) > math.floor(column * spec.exp.fraction):
            weight = polynomial_exp2(x, spec.exp.degree)
        else:
            weight = cute.math.exp2(x, fastmath=True)
        weights[i] = weight
        sums[half][i % 2] = sums[half][i % 2] + weight
    return tuple(a + b for a, b in sums)


def polynomial_exp2(x: Any, degree: int) -> Any:
    """2^x on FMA units, as `fa4core.reference.exp2` has it; below -127 it is 2^-127 or 0.

    NaN gives NaN or 2^128.
    Adding a large number rounds down and leaves the integer part in the low bits, which a shift
    moves to the exponent: Hopper's conversions are as slow as its exponentials.
    """
    x = maximum(x, cutlass.Float32(-127.0))
    rounded = add_down(x, cutlass.Float32(ROUNDER))
    fraction = x - (rounded - ROUNDER)
    p = cutlass.Float32(COEFFICIENTS[degree][-1]) if degree else cutlass.Float32(1.0)
    for coefficient in (*reversed(COEFFICIENTS[degree][:-1]), 1.0)[:degree]:
        p = fma(p, fraction, cutlass.Float32(coefficient))
    bits = p.bitcast(cutlass.Int32) + (rounded.bitcast(cutlass.Int32) << 23)
    return bits.bitcast(cutlass.Float32)


@dsl_user_op
def fma(a: Any, b: Any, c: Any, *, loc: Any = None, ip: Any = None) -> cutlass.Float32:
    """a * b + c, rounded once."""
    values = (cutlass.Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c))
    return cutlass.Float32(mlir_math.fma(*values, loc=loc, ip=ip))


@dsl_user_op
def add_down(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> cutlass.Float32:
    """a + b, rounded towards minus infinity."""
    values = [cutlass.Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    result = llvm.inline_asm(
        T.f32(), values, "add.rm.f32 $0, $1, $2;", "=f,f,f", has_side_effects=False, loc=loc, ip=ip
    )
    return cutlass.Float32(result)


@dsl_user_op
def moved(word: Any, *, loc: Any = None, ip: Any = None) -> cutlass.Int32:
    """A copy in another register, made here: what a product reads must not be written before."""
    value = cutlass.Int32(word).ir_value(loc=loc, ip=ip)
    result = llvm.inline_asm(
        T.i32(), [value], "mov.b32 $0, $1;", "=r,r", has_side_effects=True, loc=loc, ip=ip
    )
    return cutlass.Int32(result)
