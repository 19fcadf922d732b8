"""The tolerance rule: errors against float64, as a multiple of plain torch's.

Every element of a result has a magnitude: the sum of absolute values that it is computed from.
Rounding moves an element by a small multiple of `eps * magnitude`, however much cancels in it, so
errors are divided by magnitudes and become comparable between rows, heads and tensors: one large
row cannot hide a wrong small one, and a result near zero isn't measured by its own size. Then

    worst(result) <= FACTOR * worst(plain) + floor
    rms(result) <= FACTOR * rms(plain) + floor / sqrt(min(rows, 256))

where `worst` is the largest scaled error of a tensor and `rms` the root of the mean square. The
first finds a wrong element, the second a systematic loss that stays below the worst case; what luck
may hide averages out over the rows (vectors that share their roundings) of a tensor. Minus infinity
(the LSE of an empty row) must agree exactly, and a NaN is always wrong.

The floor is what a correct computation may do that plain torch, by luck or by problem size, did
not. In units of `eps` of the result's dtype:

* half types: 1, half for rounding the probabilities (or the gradients of scores) before they are
  operands, half for rounding the result. Plain rounds normalised probabilities and kernels those
  before normalisation, so one may be exact where the other is not. For gradients of captured
  tensors 1/4: they are sums in float32 that only the rounding of the output (in rowsum(O * dO))
  makes wrong, by half a unit that averages out over the values' head dim.
* float32: 4 + s + sqrt(n). n is the longest sum: roundings of its terms add up like a random walk,
  and plain torch may sum in an order that has none. s is the largest
  |scale| * sum(|q| |k|) + |modified score|: a score is wrong by about eps * s whatever the order of
  its sum, and its exponential relatively by as much.
* float64: the same, and nothing averages out: the oracle itself is as wrong as that.

Exponentials by polynomial add twice the polynomial's relative error (numerator and denominator) to
both limits: it is the same in every row. An LSE may be wrong by that error itself, once. Functions
that kernels approximate in the score functions of half types (`magnitudes.QUICK_ERROR`) move scores
by a known amount, and each element of a result by one that follows from it: that much is taken off
the error of the element before it is judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import torch

from primitives.exp import Exp

Tensor = torch.Tensor

#: Decision of the numerics contract: twice the error of plain torch.
FACTOR = 2.0

#: Largest relative error on [0, 1] of the minimax polynomial for 2^x with constant term 1 (found by
#: Lawson's iteration: 3.83e-2, 2.06e-3, 8.56e-5, 2.90e-6, 8.3e-8, 2.1e-9), by degree, with 5 % for
#: rounded coefficients and 2^-23 for float32 arithmetic. Degree 0 is the constant 1.
POLYNOMIAL_ERROR = (0.5, 4.02e-2, 2.17e-3, 9.0e-5, 3.2e-6, 2.1e-7, 1.22e-7)


@attrs.frozen
class Floor:
    """What may always be wrong, relative to magnitudes.

    Attributes:
        rounding: Of roundings, which differ between rows and average out over them.
        policy: Of the exp policy, the same everywhere.
    """

    rounding: float = 0.0
    policy: float = 0.0


def floor(
    dtype: torch.dtype,
    score: float = 0.0,
    longest_sum: int = 1,
    exp: Exp | None = None,
    *,
    captured: bool = False,
) -> Floor:
    """What may always be wrong, relative to an element's magnitude; see the module.

    Args:
        dtype: Of the result.
        score: The largest `|scale| * sum(|q| |k|) + |modified score|` of an attended pair.
        longest_sum: Terms in the longest sum: keys, queries times the group, or the head dim.
        exp: The variant's exp policy.
        captured: The result is the gradient of a captured tensor.
    """
    eps, single = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    sums = score + longest_sum**0.5
    half = eps * (0.25 if captured else 1.0) + single * sums
    base = eps * (4.0 + sums) if eps <= single else half
    return Floor(base, 2.0 * exp_error(exp))


def exp_error(exp: Exp | None) -> float:
    """The largest relative error of exponentials under a policy, beyond float32's rounding."""
    return POLYNOMIAL_ERROR[exp.degree] if exp is not None and exp.fraction > 0 else 0.0


@attrs.frozen
class Comparison:
    """One result beside the oracle's and plain torch's. Errors are relative to magnitudes.

    Attributes:
        name: Of the output or gradient.
        worst, rms: Of the result's scaled errors, less what is allowed to approximations; inf if it
            is NaN or infinite where it must not.
        plain_worst, plain_rms: Of plain torch's.
        floor: See the module.
        where: Index of the worst element; None of an empty tensor.
        given, expected, plain: Its values.
        bad: Number of elements outside the limit.
        size: Number of elements.
        rows: Number of vectors with roundings of their own: rows that differ.
    """

    name: str
    worst: float = 0.0
    rms: float = 0.0
    plain_worst: float = 0.0
    plain_rms: float = 0.0
    floor: Floor = Floor()
    where: tuple[int, ...] | None = None
    given: float = 0.0
    expected: float = 0.0
    plain: float = 0.0
    bad: int = 0
    size: int = 0
    rows: int = 1

    @property
    def limit(self) -> float:
        return FACTOR * self.plain_worst + self.floor.policy + self.floor.rounding

    @property
    def rms_limit(self) -> float:
        average = self.floor.rounding / min(self.rows, 256) ** 0.5
        return FACTOR * self.plain_rms + self.floor.policy + average

    @property
    def ok(self) -> bool:
        return self.worst <= self.limit and self.rms <= self.rms_limit

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "WRONG"
        text = (
            f"{self.name}: {verdict}; worst {self.worst:.2e} (limit {self.limit:.2e}, plain torch "
            f"{self.plain_worst:.2e}), rms {self.rms:.2e} (limit {self.rms_limit:.2e}, plain torch "
            f"{self.plain_rms:.2e})"
        )
        if self.where is not None and not self.ok:
            text += (
                f"\n    {self.bad} of {self.size} elements outside; worst at {list(self.where)}: "
                f"given {self.given:.6g}, float64 {self.expected:.6g}, plain {self.plain:.6g}"
            )
        return text


@torch.no_grad()
def compare(
    name: str,
    result: Tensor,
    oracle: Tensor,
    plain: Tensor,
    magnitude: Tensor,
    floor: Floor,
    row: int = 1,
    allowed: Tensor | float = 0.0,
) -> Comparison:
    """Judge one tensor by the rule of this module.

    Args:
        name: What the tensor is, for the report.
        result: To be judged.
        oracle: float64, the same shape.
        plain: Plain torch's, the same shape.
        magnitude: float64, the same shape, or one that broadcasts to it.
        floor: See `floor`.
        row: Elements that share their roundings: the head dim of outputs and gradients.
        allowed: How much an element may be wrong by approximation, besides.

    Raises:
        AssertionError: The shapes differ.
    """
    if result.shape != oracle.shape or plain.shape != oracle.shape:
        raise AssertionError(
            f"{name} has shape {tuple(result.shape)}; the oracle's is {tuple(oracle.shape)}, plain "
            f"torch's {tuple(plain.shape)}"
        )
    if oracle.numel() == 0:
        return Comparison(name, floor=floor)
    # What is held in `result`'s dtype has its underflow as an absolute error.
    magnitude = magnitude.expand(oracle.shape) + torch.finfo(result.dtype).smallest_normal
    error = _scaled(result, oracle, magnitude, allowed)
    yardstick = _scaled(plain, oracle, magnitude)
    usable = yardstick[yardstick.isfinite()]  # plain torch may overflow where others must not
    plain_worst = float(usable.max()) if usable.numel() else 0.0
    position = torch.unravel_index(error.argmax(), error.shape)
    where = tuple(int(i) for i in position)
    return Comparison(
        name=name,
        worst=float(error.max()),
        rms=float(error.square().mean().sqrt()),
        plain_worst=plain_worst,
        plain_rms=float(usable.square().mean().sqrt()) if usable.numel() else 0.0,
        floor=floor,
        where=where,
        given=float(result[where]),
        expected=float(oracle[where]),
        plain=float(plain[where]),
        bad=int((error > FACTOR * plain_worst + floor.policy + floor.rounding).sum()),
        size=error.numel(),
        rows=1 if result.dtype == torch.float64 else _distinct_rows(oracle, row),
    )


def _scaled(
    given: Tensor, oracle: Tensor, magnitude: Tensor, allowed: Tensor | float = 0.0
) -> Tensor:
    """(|given - oracle| - allowed) / magnitude, at least 0; 0 where both are the same infinity, inf
    where one is NaN."""
    given, oracle = given.double(), oracle.double()
    error = ((given - oracle).abs() - allowed).clamp(min=0.0) / magnitude
    error = torch.where(given == oracle, 0.0, error)
    return torch.where(error.isnan(), math.inf, error)


def _distinct_rows(oracle: Tensor, row: int) -> int:
    """Rows that begin with another number: equal ones come of equal inputs and equal roundings."""
    return oracle.reshape(-1)[::row].float().unique().numel()


def report(comparisons: Mapping[str, Comparison] | list[Comparison]) -> str:
    """The lines of a report, what is wrong first."""
    rows = list(comparisons.values() if isinstance(comparisons, Mapping) else comparisons)
    return "\n".join(f"  {c}" for c in sorted(rows, key=lambda c: c.ok))
