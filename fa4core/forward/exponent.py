"""From a score to a weight's exponent, whatever the score's magnitude."""

from __future__ import annotations

import math

import cutlass
from cutlass import cute

from fa4core.forward.spec import ForwardSpec
from fa4core.lowering.cute import select

_BITS = 0xFF << 23  # of the exponent in a float32


def exponent(
    spec: ForwardSpec, applied: cutlass.Float32, factor: cutlass.Float32
) -> tuple[cutlass.Float32, cutlass.Float32]:
    """Factor and shift of a row's scores on their way to exponents; never infinite.

    The shift is a rounded product. What rounding took is in every exponent of the row, which is
    harmless unless weights overflow (`ForwardSpec.far`). There, different scores are so far apart
    that one has all the weight, and a power of two for a factor makes the product exact.

    Args:
        spec: Of the kernel.
        applied: The maximum that weights are relative to, before scaling; -inf if there is none.
        factor: Of scores to the log2 domain, positive.
    """
    base = select(applied == -math.inf, 0.0, applied, "float")
    shift = base * factor
    power = (factor.bitcast(cutlass.Int32) & _BITS).bitcast(cutlass.Float32)
    chosen = select(near(spec, shift), factor, power, "float")
    return chosen, base * chosen


def near(spec: ForwardSpec, shift: cutlass.Float32) -> cutlass.Boolean:
    """Whether float32 is fine enough for exponents around this one; false for infinite ones."""
    return cute.math.absf(shift) < spec.far
