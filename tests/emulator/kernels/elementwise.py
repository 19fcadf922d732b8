"""Element-wise kernels: predication, integer and float arithmetic, conversions, packed pairs."""

from __future__ import annotations

import functools

import cutlass
import torch
from cutlass import cute

from kernels.case import Case

THREADS = 128


@cute.kernel
def _add_kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * THREADS + thread
    if index < cute.size(a):
        c[index] = a[index] + b[index]


@cute.jit
def add(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    blocks = cute.ceil_div(cute.size(a), THREADS)
    _add_kernel(a, b, c).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def _vector_kernel(a: cute.Tensor, c: cute.Tensor):
    """Eight bf16 values a thread in one 128-bit access, computed in float32."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    tile = cute.local_tile(a, (8,), (block * THREADS + thread,))
    out = cute.local_tile(c, (8,), (block * THREADS + thread,))
    values = cute.make_rmem_tensor(cute.make_layout(8), a.element_type)
    cute.autovec_copy(tile, values)
    x = values.load().to(cutlass.Float32)
    y = x * 0.5 * (cute.math.tanh(x * 0.7978845608 * (x * x * 0.044715 + 1.0), fastmath=True) + 1.0)
    values.store(y.to(c.element_type))
    cute.autovec_copy(values, out)


@cute.jit
def gelu(a: cute.Tensor, c: cute.Tensor):
    _vector_kernel(a, c).launch(grid=[cute.size(a) // (8 * THREADS), 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def _function_kernel(a: cute.Tensor, out: cute.Tensor, function: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * THREADS + thread
    out[index] = function(a[index])


@cute.jit
def apply(a: cute.Tensor, out: cute.Tensor, function: cutlass.Constexpr):
    _function_kernel(a, out, function).launch(
        grid=[cute.size(a) // THREADS, 1, 1], block=[THREADS, 1, 1]
    )


@cute.kernel
def _integer_kernel(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    x, y = a[thread], b[thread]
    out[0, thread] = x // y
    out[1, thread] = x % y
    out[2, thread] = (x << 3) ^ (y >> 1)
    out[3, thread] = (x & y) | (x - y * 7)
    out[4, thread] = cutlass.min(x, y) + cutlass.max(x, 5)
    out[5, thread] = cute.arch.popc(x) + cute.arch.clz(y)
    out[6, thread] = cutlass.Int32((cutlass.Int64(x) * cutlass.Int64(y)) >> 20)
    out[7, thread] = x if x > y else -y


@cute.jit
def integers(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
    _integer_kernel(a, b, out).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


def _integer_expected(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
    x, y = a.long(), b.long()
    bits = torch.tensor([bin(v).count("1") for v in a.tolist()])
    zeros = torch.tensor([32 - v.bit_length() for v in b.tolist()])
    rows = (
        x // y, x % y, (x << 3) ^ (y >> 1), (x & y) | (x - y * 7),
        torch.minimum(x, y) + x.clamp_min(5), bits + zeros, (x * y) >> 20,
        torch.where(x > y, x, -y),
    )  # fmt: skip
    return (torch.stack(rows).to(torch.int32),)


@cute.kernel
def _packed_kernel(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
    """fma, mul, add on pairs of float32 (SM100's f32x2 instructions)."""
    thread, _, _ = cute.arch.thread_idx()
    x = (a[2 * thread], a[2 * thread + 1])
    y = (b[2 * thread], b[2 * thread + 1])
    f0, f1 = cute.arch.fma_packed_f32x2(x, y, x)
    m0, m1 = cute.arch.mul_packed_f32x2(x, y)
    s0, s1 = cute.arch.add_packed_f32x2(x, y)
    out[0, 2 * thread] = f0
    out[0, 2 * thread + 1] = f1
    out[1, 2 * thread] = m0
    out[1, 2 * thread + 1] = m1
    out[2, 2 * thread] = s0
    out[2, 2 * thread + 1] = s1


@cute.jit
def packed(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
    _packed_kernel(a, b, out).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


def _packed_expected(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
    fused = (a.double() * b.double() + a.double()).float()  # exact product: one rounding
    return (torch.stack((fused, a * b, a + b)),)


@cute.kernel
def _convert_kernel(a: cute.Tensor, half: cute.Tensor, brain: cute.Tensor, whole: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    x = a[thread]
    half[thread] = x.to(cutlass.Float16)
    brain[thread] = x.to(cutlass.BFloat16)
    whole[thread] = x.to(cutlass.Int32)


@cute.jit
def convert(a: cute.Tensor, half: cute.Tensor, brain: cute.Tensor, whole: cute.Tensor):
    _convert_kernel(a, half, brain, whole).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def _narrow_kernel(a: cute.Tensor, e4m3: cute.Tensor, e5m2: cute.Tensor, back: cute.Tensor):
    """Four values a thread into both 8-bit formats, and back from one of them."""
    thread, _, _ = cute.arch.thread_idx()
    values = cute.make_rmem_tensor(cute.make_layout(4), cutlass.Float32)
    cute.autovec_copy(cute.local_tile(a, (4,), (thread,)), values)
    for out in cutlass.range_constexpr(2):
        target = e4m3 if cutlass.const_expr(out == 0) else e5m2
        narrow = cute.make_rmem_tensor(cute.make_layout(4), target.element_type)
        narrow.store(values.load().to(target.element_type))
        cute.autovec_copy(narrow, cute.local_tile(target, (4,), (thread,)))
        if cutlass.const_expr(out == 0):
            wide = cute.make_rmem_tensor(cute.make_layout(4), cutlass.Float32)
            wide.store(narrow.load().to(cutlass.Float32))
            cute.autovec_copy(wide, cute.local_tile(back, (4,), (thread,)))


@cute.jit
def narrow(a: cute.Tensor, e4m3: cute.Tensor, e5m2: cute.Tensor, back: cute.Tensor):
    _narrow_kernel(a, e4m3, e5m2, back).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def _half_kernel(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
    """Arithmetic in 16 bits, eight values a thread.

    Product and difference are apart: ptxas may fuse mul and sub that have no rounding modifier.
    """
    thread, _, _ = cute.arch.thread_idx()
    x = cute.make_rmem_tensor(cute.make_layout(8), a.element_type)
    y = cute.make_rmem_tensor(cute.make_layout(8), a.element_type)
    cute.autovec_copy(cute.local_tile(a, (8,), (thread,)), x)
    cute.autovec_copy(cute.local_tile(b, (8,), (thread,)), y)
    z = cute.make_rmem_tensor(cute.make_layout(8), a.element_type)
    for row in cutlass.range_constexpr(3):
        u, v = x.load(), y.load()
        z.store(u * v if row == 0 else u - v if row == 1 else u + v)
        cute.autovec_copy(z, cute.local_tile(out[row, None], (8,), (thread,)))


@cute.jit
def half(a: cute.Tensor, b: cute.Tensor, out: cute.Tensor):
    _half_kernel(a, b, out).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


def _positive(*shape: int) -> torch.Tensor:
    return torch.rand(*shape) * 4 + 0.05


CASES = [
    Case(
        "add ragged", add,
        lambda: (torch.randn(1000), torch.randn(1000)), lambda: (torch.empty(1000),),
        lambda a, b: (a + b,),
    ),
    Case(
        "gelu bf16", gelu,
        lambda: (torch.randn(2048).bfloat16(),), lambda: (torch.empty(2048, dtype=torch.bfloat16),),
        lambda a: (torch.nn.functional.gelu(a.double(), approximate="tanh"),),
        tolerance=4e-3,
    ),
    *(
        Case(
            name, apply,
            lambda: (_positive(64 * THREADS),), lambda: (torch.empty(64 * THREADS),),
            lambda a, exact=exact: (exact(a.double()),), constants=(function,), tolerance=1e-6,
        )
        for name, function, exact in (
            ("ex2.approx", functools.partial(cute.math.exp2, fastmath=True), torch.exp2),
            ("lg2.approx", functools.partial(cute.math.log2, fastmath=True), torch.log2),
            ("rsqrt.approx", functools.partial(cute.math.rsqrt, fastmath=True), torch.rsqrt),
            ("rcp.approx", cute.arch.rcp_approx, torch.reciprocal),
            ("sin.approx", functools.partial(cute.math.sin, fastmath=True), torch.sin),
            ("cos.approx", functools.partial(cute.math.cos, fastmath=True), torch.cos),
            ("tanh.approx", functools.partial(cute.math.tanh, fastmath=True), torch.tanh),
            ("square root", cute.math.sqrt, torch.sqrt),
            ("division", lambda x: x / (x + 3.0), lambda x: x / (x + 3.0)),
        )
    ),
    Case(
        "integers", integers,
        lambda: (torch.randint(1, 2**30, (THREADS,), dtype=torch.int32),
                 torch.randint(1, 2**12, (THREADS,), dtype=torch.int32)),
        lambda: (torch.empty(8, THREADS, dtype=torch.int32),), _integer_expected,
    ),
    Case(
        "packed f32x2", packed,
        lambda: (torch.randn(2 * THREADS), torch.randn(2 * THREADS)),
        lambda: (torch.empty(3, 2 * THREADS),), _packed_expected,
    ),
    Case(
        "conversions", convert,
        lambda: (torch.randn(THREADS) * 100,),
        lambda: (torch.empty(THREADS, dtype=torch.float16),
                 torch.empty(THREADS, dtype=torch.bfloat16),
                 torch.empty(THREADS, dtype=torch.int32)),
        lambda a: (a.half(), a.bfloat16(), a.to(torch.int32)),
    ),
    Case(
        "8-bit conversions", narrow, lambda: (torch.randn(4 * THREADS) * 60,),
        lambda: (torch.empty(4 * THREADS, dtype=torch.float8_e4m3fn),
                 torch.empty(4 * THREADS, dtype=torch.float8_e5m2), torch.empty(4 * THREADS)),
        lambda a: (a.to(torch.float8_e4m3fn), a.to(torch.float8_e5m2),
                   a.to(torch.float8_e4m3fn).float()),
    ),
    Case(
        "f16 arithmetic", half,
        lambda: (torch.randn(8 * THREADS).half(), torch.randn(8 * THREADS).half()),
        lambda: (torch.empty(3, 8 * THREADS, dtype=torch.float16),),
        lambda a, b: (torch.stack((a * b, a - b, a + b)),),
    ),
    Case(
        "add ragged sm90", add,
        lambda: (torch.randn(1000), torch.randn(1000)), lambda: (torch.empty(1000),),
        lambda a, b: (a + b,), target="sm90",
    ),
]  # fmt: skip
