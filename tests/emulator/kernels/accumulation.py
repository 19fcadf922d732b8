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


def _stored(sums: np.ndarray, form: Format, rule: Rule) -> np.ndarray:
    if form.name == "f16":
        return sums.astype(np.float16).view(np.int32)
    rounded = sums.astype(np.float32)
    toward_zero = np.nextafter(rounded, np.float32(0))
    cut = np.where(np.isfinite(rounded) & (np.abs(rounded) > np.abs(sums)), toward_zero, rounded)
    words = cut.view(np.int32)
    return np.where(np.isfinite(cut), words & -(1 << form.fraction - rule.stored), words)


def fused_sums(
    forms: tuple[Format, Format, Format],
    rule: Rule,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
) -> tuple[torch.Tensor]:
    """D = A B^T + C of blocks of words."""
    va, vb, vc = (values(x, form) for x, form in zip((a, b, c), forms, strict=True))
    with np.errstate(invalid="ignore", over="ignore"):
        plain = np.einsum("xrk,xck->xrc", va, vb) + vc
        (sa, ea), (sb, eb), (sc, ec) = (
            _split(np.where(np.isfinite(v), v, 0), f)
            for v, f in zip((va, vb, vc), forms, strict=True)
        )
        exponents = ea[:, :, None, :] + eb[:, None, :, :]
        significands = sa[:, :, None, :] * sb[:, None, :, :]
        greatest = np.maximum(exponents.max(-1), ec)
        parts = np.trunc(np.ldexp(significands, rule.kept + exponents - greatest[..., None]))
        total = parts.sum(-1) + np.trunc(np.ldexp(sc, rule.kept + ec - greatest))
        sums = np.ldexp(total, greatest - rule.kept)
        words = _stored(sums, forms[2], rule)
    nan = np.int32(0x7FFF7FFF if forms[2].name == "f16" else 0x7FFFFFFF)
    if forms[2].name == "f16":
        with np.errstate(invalid="ignore", over="ignore"):
            odd = plain.astype(np.float16)
        got = words.view(np.float16).copy()
        got = np.where(np.isfinite(plain), got, odd).view(np.int16)
        got = np.where(np.isnan(plain), np.int16(0x7FFF), got)
        return (torch.from_numpy(np.ascontiguousarray(got).view(np.int32)),)
    odd = plain.astype(np.float32).view(np.int32)
    words = np.where(np.isfinite(plain), words, odd)
    words = np.where(np.isnan(plain), nan, words)
    return (torch.from_numpy(np.ascontiguousarray(words.astype(np.int32))),)
