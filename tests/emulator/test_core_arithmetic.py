"""Arithmetic of the core against numpy and exact fractions, instruction by instruction."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from core_ptx import per_thread

rng = np.random.default_rng(0)
N = 256
A = rng.integers(0, 2**32, N, dtype=np.uint32)
B = rng.integers(0, 2**32, N, dtype=np.uint32)
C = rng.integers(0, 2**32, N, dtype=np.uint32)
A[:6] = 0, 1, 2**31, 2**32 - 1, 2**31 - 1, 5
B[:6] = 2**32 - 1, 0, 2**32 - 1, 2**31, 7, 33
SIGNED = A.view(np.int32).astype(np.int64), B.view(np.int32).astype(np.int64)
INSERTED = (B & ~np.uint32(0xFF0)) | (A & np.uint32(255)) << np.uint32(4)
HALVES = [x.view(np.int16).reshape(-1, 2) for x in (A, B)]
EXTREME16 = np.maximum(0, np.maximum(*HALVES)).astype(np.int16).view(np.uint32).ravel()
WIDE = A.astype(np.uint64), B.astype(np.uint64), C.astype(np.uint64)


def low(x) -> np.ndarray:
    return (np.asarray(x).astype(object) % 2**32).astype(np.uint32)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("add.s32 %r10, %r11, %r12;", low(WIDE[0] + WIDE[1])),
        ("sub.s32 %r10, %r11, %r12;", A - B),
        ("mul.lo.s32 %r10, %r11, %r12;", A * B),
        ("mul.hi.u32 %r10, %r11, %r12;", (WIDE[0] * WIDE[1] >> np.uint64(32)).astype(np.uint32)),
        ("mul.hi.s32 %r10, %r11, %r12;", low(SIGNED[0] * SIGNED[1] >> 32)),
        ("mad.lo.s32 %r10, %r11, %r12, %r13;", A * B + C),
        ("min.s32 %r10, %r11, %r12;", low(np.minimum(*SIGNED))),
        ("max.u32 %r10, %r11, %r12;", np.maximum(A, B)),
        ("max.relu.s32 %r10, %r11, %r12;", low(np.maximum(0, np.maximum(*SIGNED)))),
        ("min.relu.s32 %r10, %r11, %r12;", low(np.maximum(0, np.minimum(*SIGNED)))),
        ("max.relu.s16x2 %r10, %r11, %r12;", EXTREME16),
        ("abs.s32 %r10, %r11;", low(np.abs(SIGNED[0]))),
        ("shl.b32 %r10, %r11, 7;", A << np.uint32(7)),
        ("shl.b32 %r10, %r11, 32;", A * np.uint32(0)),
        ("shr.s32 %r10, %r11, 40;", low(SIGNED[0] >> 31)),
        ("shr.u32 %r10, %r11, 9;", A >> np.uint32(9)),
        ("shf.l.wrap.b32 %r10, %r11, %r12, 4;", (B << np.uint32(4)) | (A >> np.uint32(28))),
        ("shf.r.clamp.b32 %r10, %r11, %r12, 40;", B),
        ("lop3.b32 %r10, %r11, %r12, %r13, 0xca;", (A & B) | (~A & C)),
        ("prmt.b32 %r10, %r11, %r12, 0x0175;", None),
        ("popc.b32 %r10, %r11;", np.array([int(x).bit_count() for x in A], np.uint32)),
        ("clz.b32 %r10, %r11;", np.array([32 - int(x).bit_length() for x in A], np.uint32)),
        ("brev.b32 %r10, %r11;", np.array([int(f"{x:032b}"[::-1], 2) for x in A], np.uint32)),
        ("bfe.u32 %r10, %r11, 5, 9;", A >> np.uint32(5) & np.uint32(511)),
        ("bfe.s32 %r10, %r11, 28, 8;", low(SIGNED[0] >> 28)),
        ("bfi.b32 %r10, %r11, %r12, 4, 8;", INSERTED),
    ],
    ids=lambda value: value.split(" ")[0] if isinstance(value, str) else "",
)  # fmt: skip
def test_integer(code: str, expected: np.ndarray | None):
    if expected is None:  # prmt: bytes 5, 7, 1, 0 of {B, A}, lowest first
        pair = (WIDE[1] << np.uint64(32)) | WIDE[0]
        parts = [(pair >> np.uint64(8 * byte)) & np.uint64(255) for byte in (5, 7, 1, 0)]
        expected = sum(p << np.uint64(8 * i) for i, p in enumerate(parts)).astype(np.uint32)
    assert np.array_equal(per_thread(code, A, B, C), expected)


def test_wide_integers():
    got = per_thread("mad.wide.s32 %rd10, %r11, %r12, %rd13;", A, B, WIDE[2], out=np.int64)
    want = [int(a) * int(b) + int(c) for a, b, c in zip(*SIGNED, WIDE[2], strict=True)]
    assert got.tolist() == [(w + 2**63) % 2**64 - 2**63 for w in want]
    code = "add.cc.u32 %r20, %r11, %r12; addc.u32 %r10, 0, 0;"
    carries = (WIDE[0] + WIDE[1] >> np.uint64(32)).astype(np.uint32)
    assert np.array_equal(per_thread(code, A, B), carries)


F, G = (np.ldexp(rng.standard_normal(N), rng.integers(-30, 30, N)).astype(np.float32) for _ in "FG")
H = (rng.standard_normal(N) * 100).astype(np.float32)


def rounded(exact: Fraction, mode: str) -> float:
    """The float next to an exact value in the direction of a rounding mode."""
    near = np.float32(float(exact))  # a double first: only used to find neighbours
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    below = max(x for x in around if Fraction(float(x)) <= exact)
    above = min(x for x in around if Fraction(float(x)) >= exact)
    if mode == "rm":
        return below
    if mode == "rp":
        return above
    if mode == "rz":
        return below if exact >= 0 else above
    gap = exact - Fraction(float(below)), Fraction(float(above)) - exact
    if gap[0] == gap[1]:
        return below if below.view(np.uint32) % 2 == 0 else above
    return below if gap[0] < gap[1] else above


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("op", ["add", "mul", "fma"])
def test_float_rounding(op: str, mode: str):
    code = f"{op}.{mode}.f32 %r10, %r11, %r12" + (", %r13;" if op == "fma" else ";")
    got = per_thread(code, F, G, H, out=np.float32)
    for a, b, c, result in zip(F, G, H, got, strict=True):
        x, y, z = (Fraction(float(v)) for v in (a, b, c))
        exact = {"add": x + y, "mul": x * y, "fma": x * y + z}[op]
        assert result == rounded(exact, mode), (a, b, c)


def test_packed_rounds_down():
    code = """mov.b64 %rd20, {%r11, %r12}; mov.b64 %rd21, {%r13, %r13};
    add.rm.f32x2 %rd22, %rd20, %rd21; mov.b64 {%r10, %r30}, %rd22; xor.b32 %r10, %r10, %r30;"""
    got = per_thread(code, F, G, H)

    def sums(x: np.ndarray) -> np.ndarray:
        exact = [Fraction(float(a)) + Fraction(float(c)) for a, c in zip(x, H, strict=True)]
        return np.array([rounded(y, "rm") for y in exact], np.float32).view(np.uint32)

    assert np.array_equal(got, sums(F) ^ sums(G))


def test_extremes_and_nan():
    nan, inf = np.float32(np.nan), np.float32(np.inf)
    a = np.array([nan, 1, nan, -0.0, 0.0, inf] + [1] * 26, np.float32)
    b = np.array([2, nan, nan, 0.0, -0.0, 3] + [2] * 26, np.float32)
    got = per_thread("max.f32 %r10, %r11, %r12;", a, b)
    assert got[:6].tolist() == [0x40000000, 0x3F800000, 0x7FFFFFFF, 0, 0, 0x7F800000]
    got = per_thread("min.NaN.f32 %r10, %r11, %r12;", a, b)
    assert got[:6].tolist() == [0x7FFFFFFF] * 3 + [0x80000000] * 2 + [0x40400000]


def test_flush_to_zero():
    tiny = np.full(32, np.float32(1e-40))
    assert not per_thread("add.ftz.f32 %r10, %r11, %r11;", tiny).any()
    assert per_thread("add.f32 %r10, %r11, %r11;", tiny, out=np.float32)[0] == tiny[0] * 2


@pytest.mark.parametrize(
    ("name", "function", "inputs"),
    [
        ("ex2.approx.f32", np.exp2, np.linspace(-140, 127, N)),
        ("ex2.approx.ftz.f32", np.exp2, np.linspace(-20, 20, N)),
        ("lg2.approx.f32", np.log2, np.linspace(1e-3, 1e3, N)),
        ("rcp.approx.ftz.f32", lambda x: 1 / x, np.linspace(0.01, 100, N)),
        ("rsqrt.approx.f32", lambda x: x**-0.5, np.linspace(0.01, 100, N)),
        ("sqrt.rn.f32", np.sqrt, np.linspace(0, 100, N)),
        ("tanh.approx.f32", np.tanh, np.linspace(-4, 4, N)),
    ],
)
def test_functions_are_rounded_once(name: str, function, inputs: np.ndarray):
    x = inputs.astype(np.float32)
    got = per_thread(f"{name} %r10, %r11;", x, out=np.float32)
    assert np.array_equal(got, function(x.astype(np.float64)).astype(np.float32))


def test_bfloat_and_half_conversions():
    x = np.concatenate([F, [np.inf, -np.inf, 65519.0, 65520.0, 6e-8, 2.9e-8]]).astype(np.float32)
    x = np.resize(x, 288)
    half = per_thread("cvt.rn.f16x2.f32 %r10, %r11, %r11;", x) & 0xFFFF
    with np.errstate(over="ignore"):
        assert np.array_equal(half.astype(np.uint16), x.astype(np.float16).view(np.uint16))
    bits = x.view(np.uint32).astype(np.uint64)
    want = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    got = per_thread("cvt.rn.bf16x2.f32 %r10, %r12, %r11;", x, np.zeros_like(x))
    assert np.array_equal(got.astype(np.uint64), want)
    code = "{.reg .b16 h; cvt.u16.u32 h, %r11; cvt.f32.f16 %r10, h;}"
    back = per_thread(code, half.astype(np.uint32), out=np.float32)
    assert np.array_equal(back, half.astype(np.uint16).view(np.float16).astype(np.float32))


@pytest.mark.parametrize(("name", "digits"), [("e4m3", 3), ("e5m2", 2)])
def test_8_bit_floats_round_trip(name: str, digits: int):
    codes = np.arange(256, dtype=np.uint32)
    code = f"{{.reg .b16 h; cvt.u16.u32 h, %r11; cvt.rn.f16x2.{name}x2 %r10, h;}}"
    halves = (per_thread(code, codes) & 0xFFFF).astype(np.uint16).view(np.float16)
    finite = np.isfinite(halves)
    assert finite.sum() == (254 if digits == 3 else 248)
    code = f"{{.reg .b16 h; cvt.rn.satfinite.{name}x2.f32 h, %r12, %r11; cvt.u32.u16 %r10, h;}}"
    values = np.where(finite, halves, 1).astype(np.float32)
    assert np.array_equal(per_thread(code, values, np.zeros_like(values))[finite], codes[finite])


def test_mixed_precision_sources_are_narrow():
    x = np.array([1.5, -2.25, 3.0, 0.5] * 8, np.float32)
    narrow = (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    got = per_thread("fma.rn.f32.bf16 %r10, %h11, %h11, %r12;", narrow, x, out=np.float32)
    assert np.array_equal(got, x * x + x)


def test_float_to_integer():
    x = np.array([1.5, 2.5, -1.5, -0.5, 3e9, -3e9, np.nan, 7.99] * 4, np.float32)
    got = per_thread("cvt.rzi.s32.f32 %r10, %r11;", x, out=np.int32)
    assert got[:8].tolist() == [1, 2, -1, 0, 2**31 - 1, -(2**31), 0, 7]
    got = per_thread("cvt.rni.s32.f32 %r10, %r11;", x, out=np.int32)
    assert got[:4].tolist() == [2, 2, -2, 0]
    got = per_thread("cvt.rmi.f32.f32 %r10, %r11;", x, out=np.float32)
    assert got[:4].tolist() == [1, 2, -2, -1]
