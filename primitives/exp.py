"""How exponentials are computed, and how far the running maximum may lag behind.

FlashAttention-4 (section 3.1) computes part of the exponentials on FMA units, because the MUFU
unit is as busy as the tensor cores, and skips the rescaling of the accumulator while the maximum
has grown little. Both are policies here, with a stated error; every backend honours them.
"""

from __future__ import annotations

import attrs

MAX_DEGREE = 6


def _fraction(_: object, attribute: attrs.Attribute, value: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 <= value <= 1.0:
        raise ValueError(f"fraction={value!r}; a share between 0 and 1 is accepted")


def _degree(_: object, attribute: attrs.Attribute, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_DEGREE:
        raise ValueError(f"degree={value!r}; an int from 0 to {MAX_DEGREE} is accepted")


@attrs.frozen
class Exp:
    """Share `fraction` of the exponentials by a polynomial of degree `degree`, the rest by MUFU.

    Of the pairs of neighbours in a row, every (1/fraction)-th is emulated, so the mix is
    reproducible.

    Attributes:
        degree: Of the polynomial for 2^x on [0, 1), 0 to 6. Degree 3 has a relative error of at
            most 8.8e-5, below bf16's rounding of the probabilities (2^-9).
        fraction: Share of the elements that it computes, 0 to 1.

    Raises:
        ValueError: A degree or a fraction outside its range.
    """

    degree: int = attrs.field(default=3, validator=_degree)
    fraction: float = attrs.field(default=0.0, validator=_fraction)


def hardware() -> Exp:
    """Every exponential by the hardware's exp2 (relative error about 2^-22)."""
    return Exp(fraction=0.0)


def polynomial(degree: int = 3) -> Exp:
    """Every exponential on FMA units: Cody-Waite range reduction and a polynomial on [0, 1).

    Args:
        degree: 0 to 6 (FlashAttention-4, section 3.1, uses 3).

    Raises:
        ValueError: Another degree.
    """
    return Exp(degree, 1.0)


def mixed(degree: int = 3, fraction: float = 0.125) -> Exp:
    """A share of the exponentials on FMA units, the rest by hardware.

    Args:
        degree: Of the polynomial, 0 to 6.
        fraction: The share, 0 to 1; 10 to 25 % balance the two kinds of units on Blackwell.

    Raises:
        ValueError: A degree or a fraction outside its range.
    """
    return Exp(degree, fraction)
