"""The statistics of a thread's row, block by block: maximum, factor for what is there, sum.

A block's first weights are computed before its maximum is known, relative to the one applied so
far. Rescaling is lazy, so they nearly always stand, and the maximum costs no time: comparisons and
exponentials are on different units. Where a row of the warp has to follow its maximum, the warp
computes them again.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import cutlass
from cutlass import cute

from fa4core.forward.exponent import exponent, near
from fa4core.lowering.cute import select
from fa4core.pipeline.effects import Fixed
from fa4core.sm100.exp import exp2_row
from fa4core.sm100.forward.spec import PARTS, TILE, Spec

NEVER = -math.inf
WIDTH = TILE // PARTS  # scores of a part
ROUNDINGS = 8.0  # that an exponent with a bias may suffer, at most
CHAINS = 4  # independent maxima and sums of a row, or each would wait for the one before it

#: NaN if either is.
maximum = functools.partial(cute.arch.fmax, nan=True)


class Block(Fixed):
    """A row's scores of a block, and what they weigh.

    Attributes:
        scores, weights: In registers; weights by parts, as far as they are computed.
        exponent: Factor and shift of a score on its way to a weight's exponent.
        bias: To be added to scores of even and of odd keys; None if nothing is.
        factor: For what was accumulated before. `Rows.take` sets it and `exponent`.
    """

    exponent: tuple[Any, Any]
    factor: Any

    def __init__(self, spec: Spec, scores: cute.Tensor, bias: tuple[Any, Any] | None):
        self.spec, self.scores, self.bias = spec, scores, bias
        self.weights = cute.make_rmem_tensor(cute.make_layout(TILE), cutlass.Float32)

    def weigh(self, part: int, exponent: tuple[Any, Any]) -> None:
        """Compute a part of the weights."""
        keys = range(part * WIDTH, (part + 1) * WIDTH)
        factor, shift = exponent
        shifts = (shift, shift)
        if self.bias is not None:
            shifts = tuple(shift - b * factor for b in self.bias)
        exp2_row(self.spec, self.scores, self.weights, keys, factor, shifts)

    @property
    def peak(self) -> cutlass.Float32:
        """The greatest score."""

        def pair(i: int, c: int) -> tuple[Any, Any]:
            """Of chain c: neighbours; with a bias both of even or both of odd keys."""
            first, apart = (i + 2 * c, 1) if self.bias is None else (i + c, CHAINS)
            return self.scores[first], self.scores[first + apart]

        peaks = [maximum(*pair(0, c)) for c in range(CHAINS)]
        for i in range(2 * CHAINS, TILE, 2 * CHAINS):
            for c in range(CHAINS):
                a, b = pair(i, c)  # two at once: one instruction of three operands
                peaks[c] = maximum(maximum(peaks[c], a), b)
        if self.bias is not None:
            peaks = [peak + self.bias[c % 2] for c, peak in enumerate(peaks)]
        return functools.reduce(maximum, peaks)

    @property
    def sum(self) -> cutlass.Float32:
        """Of the weights."""
        add, weights = cute.arch.add_packed_f32x2, self.weights
        pairs = [(weights[i], weights[i + 1]) for i in range(0, TILE, 2)]
        chains = [functools.reduce(add, pairs[c::CHAINS]) for c in range(CHAINS)]
        low, high = functools.reduce(add, chains)
        return low + high


class Rows:
    """Statistics of a thread's row, of scores before they are scaled to the log2 domain.

    Attributes:
        applied, highest: The maximum that was applied, and the true one.
        total: Of the weights.
        exponent: Factor and shift that follow from `applied`.
        factor: Of scores on their way to the log2 domain, positive.
    """

    def __init__(self, spec: Spec, factor: Any, numbers: tuple | None = None):
        self.spec, self.factor = spec, factor
        if numbers is None:
            never = cutlass.Float32(NEVER)
            numbers = never, never, cutlass.Float32(0.0), *exponent(spec, never, factor)
        self.applied, self.highest, self.total = numbers[:3]
        self.exponent = numbers[3:]

    @property
    def _numbers(self) -> tuple:
        return self.applied, self.highest, self.total, *self.exponent

    def __extract_mlir_values__(self) -> list:
        return [v for n in self._numbers for v in n.__extract_mlir_values__()]

    def __new_from_mlir_values__(self, values: list) -> Rows:
        numbers = zip(self._numbers, values, strict=True)
        new = tuple(n.__new_from_mlir_values__([v]) for n, v in numbers)
        return Rows(self.spec, self.factor, new)

    def take(self, scores: cute.Tensor, bias: tuple[Any, Any] | None, ahead: bool) -> Block:
        """Take in the maximum of a block, and compute its first weights.

        Args:
            bias: See `Block`.
            ahead: Whether to compute them before the maximum is known. It takes registers for a
                part of the scores more, which code that also evaluates mods does not have.
        """
        block = Block(self.spec, scores, bias)
        if ahead:
            block.weigh(0, self.exponent)
        peak = block.peak
        if bias is not None:
            block.bias = _add_if_far(block, self.factor, peak, *bias)
        self.highest = maximum(self.highest, peak)
        found = _follow(block, ahead, self.factor, self.applied, self.highest, *self.exponent)
        self.applied, block.factor, *self.exponent = found
        block.exponent = self.exponent
        if not ahead:
            block.weigh(0, self.exponent)
        self.total = self.total * block.factor
        return block

    def add(self, block: Block) -> None:
        """Take in the sum of a block."""
        self.total = self.total + block.sum


@cute.jit
def _add_if_far(block: Block, factor: Any, peak: Any, even: Any, odd: Any):
    """The bias that weights still need: none where it was so large that it had to be added.

    There the roundings of exponents that add it late could make weights infinite, or all of a row's
    zero; see `near`. Sums of a score and its bias are rounded as in the maximum.
    """
    size = magnitude(peak) + magnitude(even) + TILE * magnitude(odd - even)
    far = near(block.spec, ROUNDINGS * size * factor) ^ True  # true for NaN
    if cute.arch.vote_any_sync(far):
        _add_pairs(block.scores, even, odd)
        even, odd = cutlass.Float32(0.0), cutlass.Float32(0.0)
    return even, odd


def _add_pairs(scores: cute.Tensor, even: Any, odd: Any) -> None:
    for i in range(0, cute.size(scores), 2):
        pair = cute.arch.add_packed_f32x2((scores[i], scores[i + 1]), (even, odd))
        scores[i], scores[i + 1] = pair


def magnitude(x: Any) -> Any:
    return cute.arch.fmax(x, -x)


@cute.jit
def _follow(
    block: Any,
    again: cutlass.Constexpr,
    factor: Any,
    applied: Any,
    highest: Any,
    scale: Any,
    shift: Any,
):
    """The maximum to apply, the factor for what was accumulated, and the new exponent."""
    growth = (highest - applied) * factor
    grown = growth > block.spec.threshold  # false for -inf - -inf and NaN
    shrink = cutlass.Float32(1.0)
    if cute.arch.vote_any_sync(grown):
        applied = select(grown, highest, applied, "float")
        shrink = cute.math.exp2(select(grown, -growth, 0.0, "float"), fastmath=True)
        scale, shift = exponent(block.spec, applied, factor)
        if cutlass.const_expr(again):
            block.weigh(0, (scale, shift))
    return applied, shrink, scale, shift
