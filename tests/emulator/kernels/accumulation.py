"""What NVIDIA's tensor cores make of a sum of products: a plain model in exact arithmetic.

The products of one instruction and the accumulator are aligned to the greatest of their exponents,
cut off below a fixed number of fraction bits, and summed exactly; the sum is cut off to the
accumulator's width, or rounded to nearest for f16. An exponent is the sum of the factors'
exponents, so a product's significand is in [1, 4). Sources: Fasi, Higham, Mikaitis and Pranesh,
"Numerical behavior of NVIDIA tensor cores" (PeerJ Computer Science 7:e330); Xie et al., "MMA-Sim"
(arXiv 2511.10909); Khattak and Mikaitis, "Accurate models of NVIDIA tensor cores" (arXiv
2512.07004).
"""

from __future__ import annotations

import attrs
import numpy as np
import torch


@attrs.frozen
class Format:
    """A floating-point format: its bits, and a NaN and an infinity (or, without one, a NaN)."""

    name: str
    exponent: int
    fraction: int
    dtype: torch.dtype
    nan: int
    infinity: int

    @property
    def width(self) -> int:
        return 1 + self.exponent + self.fraction

    @property
    def emin(self) -> int:
        return 2 - 2 ** (self.exponent - 1)

    @property
    def emax(self) -> int:
        return 1 - self.emin + (self.name == "e4m3")


FORMATS = {
    form.name: form
    for form in (
        Format("f16", 5, 10, torch.float16, 0x7E00, 0x7C00),
        Format("bf16", 8, 7, torch.bfloat16, 0x7FC0, 0x7F80),
        Format("tf32", 8, 23, torch.float32, 0x7FC00000, 0x7F800000),  # as it is stored
        Format("e4m3", 4, 3, torch.float8_e4m3fn, 0x7F, 0x7F),
        Format("e5m2", 5, 2, torch.float8_e5m2, 0x7E, 0x7C),
        Format("f32", 8, 23, torch.float32, 0x7FC00000, 0x7F800000),
    )
}


Formats = tuple[Format, Format, Format]  # of A, B and C
Words = torch.Tensor


@attrs.frozen
class Rule:
    """Fraction bits that summands keep below the greatest exponent, and those of a float32 sum."""

    kept: int
    stored: int


def values(words: torch.Tensor, form: Format) -> np.ndarray:
    """The numbers in 32-bit words, as float64."""
    if form.name == "tf32":
        words = words & ~0x1FFF
    return words.contiguous().view(form.dtype).double().numpy()


def _split(x: np.ndarray, form: Format) -> tuple[np.ndarray, np.ndarray]:
    """Significands below 2, and exponents: the least one for subnormals; zero has one below all."""
    exponents = np.maximum(np.frexp(x)[1] - 1, form.emin)
    return np.ldexp(x, -exponents), np.where(x == 0, -1000, exponents)


def _stored(sums: np.ndarray, form: Format, rule: Rule) -> torch.Tensor:
    """Sums (exact, or infinite or NaN) as words of the accumulator's format."""
    if form.name == "f16":
        halves = np.where(np.isnan(sums), np.int16(0x7FFF), sums.astype(np.float16).view(np.int16))
        return torch.from_numpy(halves).view(torch.int32)
    near = sums.astype(np.float32)
    above = (np.abs(near) > np.abs(sums)) & (np.abs(sums) < 2.0**128)
    cut = np.where(above, np.nextafter(near, np.float32(0)), near).view(np.int32)
    cut &= -(1 << form.fraction - rule.stored)
    return torch.from_numpy(np.where(np.isnan(sums), np.int32(0x7FFFFFFF), cut))


def fused_sums(forms: Formats, rule: Rule, a: Words, b: Words, c: Words) -> tuple[Words]:
    """D = A B^T + C, of blocks of words, summed at once."""
    va, vb, vc = (values(x, form) for x, form in zip((a, b, c), forms, strict=True))
    with np.errstate(invalid="ignore", over="ignore"):
        plain = np.einsum("xrk,xck->xrc", va, vb) + vc
        (sa, ea), (sb, eb), (sc, ec) = (
            _split(np.where(np.isfinite(v), v, 0), form)
            for v, form in zip((va, vb, vc), forms, strict=True)
        )
        exponents = ea[:, :, None, :] + eb[:, None, :, :]
        significands = sa[:, :, None, :] * sb[:, None, :, :]
        greatest = np.maximum(exponents.max(-1), ec)
        last = greatest - rule.kept
        parts = np.trunc(np.ldexp(significands, exponents - last[..., None])).sum(-1)
        sums = np.ldexp(parts + np.trunc(np.ldexp(sc, ec - last)), last)
        return (_stored(np.where(np.isfinite(plain), sums, plain), forms[2], rule),)


def halved_sums(forms: Formats, rule: Rule, a: Words, b: Words, c: Words) -> tuple[Words]:
    """What `mma.sync` of 8-bit numbers does on Hopper: the lower halves of all words are summed
    from zero, the upper halves on top, and C is added in float32."""
    total = torch.zeros_like(c)
    for half in (slice(0, 2), slice(2, 4)):
        part_a, part_b = (
            x.view(torch.uint8).unflatten(-1, (-1, 4))[..., half].flatten(-2).view(torch.int32)
            for x in (a, b)
        )
        (total,) = fused_sums(forms, rule, part_a, part_b, total)
    d = c.view(torch.float32) + total.view(torch.float32)
    return (torch.where(d.isnan(), 0x7FFFFFFF, d.view(torch.int32)),)
