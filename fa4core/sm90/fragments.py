"""A thread's share of wgmma's accumulators, and arithmetic on its elements.

A thread holds two of a warpgroup's rows, 8 apart, and of each the columns 8 c + 2 (lane % 4) +
{0, 1}: four threads share a row. In that order the elements, rounded to 16 bits, are an operand A.
"""

from __future__ import annotations

import functools
from typing import Any

import cutlass
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass._mlir.dialects import math as mlir_math
from cutlass.cutlass_dsl import T, dsl_user_op

from fa4core.reference.exp2 import COEFFICIENTS

HALVES = (0, 1)  # the rows of a thread: r and r + 8
maximum = functools.partial(cute.arch.fmax, nan=True)  # NaN if either is
ROUNDER = 1.5 * 2.0**23  # added to a float32, it leaves an integer in the low bits


def half_of(accumulator: cute.Tensor, half: int) -> cute.Tensor:
    """One of the two rows of a thread's accumulator: pairs of columns, 4 registers apart."""
    pairs = cute.size(accumulator) // 4
    return cute.make_tensor(
        accumulator.iterator + 2 * half, cute.make_layout((2, pairs), stride=(1, 4))
    )


def column(i: int) -> int:
    """Where element `i` of a row lies, counted from the thread's first column."""
    return i // 2 * 8 + i % 2


def row_of(thread: Any) -> Any:
    """The first row of a thread, 0..127 of its warpgroup."""
    return thread // 32 * 16 + thread % 32 // 4


def place_in_row(thread: Any) -> Any:
    """Which of the four threads that share a row.

    By way of the lane: the compiler makes other, unmeasured code of `thread % 4`.
    """
    return thread % 32 % 4


def first_column(thread: Any) -> Any:
    """The first column of a thread."""
    return 2 * place_in_row(thread)


def copy_words(of: cute.Tensor, to: cute.Tensor, how: Any = lambda word: word) -> None:
    """16-bit numbers in registers, two at a time."""
    flat = cute.make_layout(cute.size(of))
    source, target = (
        cute.recast_tensor(cute.make_tensor(t.iterator, flat), cutlass.Int32) for t in (of, to)
    )
    for i in range(cute.size(source)):
        target[i] = how(source[i])


def clear(accumulator: cute.Tensor) -> None:
    """Zeros, made here: a constant would be put into registers behind the fence of a product."""
    words = cute.recast_tensor(accumulator, cutlass.Int32)
    for i in range(cute.size(words)):
        words[i] = moved(0)


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
