"""Statistics of the two rows that a consumer thread shares with three others, and their exp2."""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import cute

from fa4core.forward.exponent import exponent, near
from fa4core.lowering.cute import select
from fa4core.sm90.forward.spec import Spec
from fa4core.sm90.fragments import HALVES, fma, maximum, polynomial_exp2

NEVER = -math.inf
ROUNDINGS = 8.0  # that an exponent with a bias may suffer, at most


def over_quad(value: Any, function: Any) -> Any:
    """Combine the values of the four threads that share a row."""
    for distance in (1, 2):
        value = function(value, cute.arch.shuffle_sync_bfly(value, offset=distance))
    return value


class Rows:
    """Statistics of a thread's rows, of scores before factors take them to the log2 domain.

    Rescaling is lazy (FlashAttention-4, section 3.1): `applied` is the maximum that P, the sum and
    O are relative to; it follows the true one only when that may have grown by more than the
    threshold, and then all the way: O is rescaled anyhow, and a maximum that lags would make every
    later block look like another growth.
    Sums and true maxima are over the thread's own columns until the end.

    A bias that grows evenly from key to key is (start, step) for each row. Scores have the steps;
    the start goes into the exponent's shift, or is added where exponents have to be exact.
    """

    def __init__(self, spec: Spec, factors: tuple, values: list | None = None):
        self.spec, self.factors = spec, factors
        never, zero = cutlass.Float32(NEVER), cutlass.Float32(0.0)
        values = [never, never, never, never, zero, zero] if values is None else values
        self.applied, self.highest, self.total = values[:2], values[2:4], values[4:]

    def _numbers(self) -> list:
        return [*self.applied, *self.highest, *self.total]

    def __extract_mlir_values__(self) -> list:
        return [v for n in self._numbers() for v in n.__extract_mlir_values__()]

    def __new_from_mlir_values__(self, values: list) -> Rows:
        numbers = zip(self._numbers(), values, strict=True)
        return Rows(self.spec, self.factors, [n.__new_from_mlir_values__([v]) for n, v in numbers])

    def outgrown(self, sums: tuple, bias: tuple | None) -> Any:
        """Whether the maximum of a row of this warp may have grown by more than the threshold.

        No term of a sum of at most 2^threshold is greater than that; no maximum has to be found to
        see it. Sums that are infinite or no number count as greater, and nothing is known of a row
        that has not seen a score, or whose scores are so large that weights need exact exponents.
        """
        most = 2.0**self.spec.threshold
        known = [
            (sums[half] <= most) & near(self.spec, self._size(half, bias) * self.factors[half])
            for half in HALVES
        ]
        return cute.arch.vote_all_sync(known[0] & known[1]) ^ True

    def _size(self, half: int, bias: tuple | None) -> Any:
        """Of the numbers that a weight's exponent comes from, before factors; see `far`."""
        applied = self.applied[half]
        if bias is None:
            return applied
        start, step = bias[half]
        return ROUNDINGS * (_size(applied) + _size(start) + self.spec.block * _size(step))

    def see(self, peaks: tuple, bias: tuple | None) -> None:
        """Take in the maxima of a block, if they are wanted for themselves."""
        if not self.spec.row_max:
            return
        if bias is not None:
            peaks = tuple(peak + start for peak, (start, _) in zip(peaks, bias, strict=True))
        self.highest = [
            maximum(highest, peak) for highest, peak in zip(self.highest, peaks, strict=True)
        ]

    def raise_maximum(self, peaks: tuple) -> tuple:
        """Take in the maxima of a block; gives the factors for what was accumulated before."""
        return tuple(self._raise(half, peaks[half]) for half in HALVES)

    def _raise(self, half: int, peak: Any) -> Any:
        highest = over_quad(maximum(self.highest[half], peak), maximum)
        growth = (highest - self.applied[half]) * self.factors[half]
        grown = growth > 0.0  # false for -inf - -inf and NaN
        applied = select(grown, highest, self.applied[half], "float")
        shrink = cute.math.exp2(select(grown, -growth, 0.0, "float"), fastmath=True)
        self.highest[half], self.applied[half] = highest, applied
        self.total[half] = self.total[half] * shrink
        return shrink

    def add(self, amounts: tuple) -> None:
        self.total = [total + amount for total, amount in zip(self.total, amounts, strict=True)]

    def exponent(self, half: int, exact: bool, bias: tuple | None) -> tuple[Any, Any]:
        """Factor and shift of a score on its way to a weight's exponent.

        The exact ones are right for scores of any magnitude, to which the bias has been added; see
        `outgrown` for when the others are not, which need fewer registers.
        """
        factor, applied = self.factors[half], self.applied[half]
        if exact:
            return exponent(self.spec, applied, factor)
        return factor, (applied if bias is None else applied - bias[half][0]) * factor


def _size(x: Any) -> Any:
    return cute.arch.fmax(x, -x)


def exp2_block(
    spec: Spec,
    scores: cute.Tensor,
    weights: cute.Tensor,
    rows: Rows,
    exact: bool,
    bias: tuple | None,
) -> tuple:
    """weights[i] = 2^(factor * scores[i] - shift), both of its row; gives the sums of both rows.

    A share of the exponentials is a polynomial's; it is a share of each thread's columns, and so of
    each row's.
    """
    exponents = [rows.exponent(half, exact, bias) for half in HALVES]
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
