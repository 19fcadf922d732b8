"""Single tensor-core instructions on bit patterns from the whole range of their types.

Words in, words out: each block multiplies 64 x 32 bytes of A with 8 x 32 bytes of B and adds C, by
one `mma.sync` of each of its warps or by one `wgmma`. `accumulation` says what comes out.
"""

from __future__ import annotations

import functools

import cutlass
import torch
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from kernels.accumulation import FORMATS, Format, Formats, Rule, fused_sums, halved_sums, values
from kernels.case import Case

BLOCKS = 64
ROWS, COLUMNS, WORDS = 64, 8, 8  # of a block; words of 32 bits along k


def _mma_text(shape: str, types: str, count: int) -> str:
    """The instruction on registers $0.. (D, tied to C), A, B."""
    names = iter(range(2 * count + 6))
    d, a, b = ([f"${next(names)}" for _ in range(n)] for n in (count, 4, 2))
    group = (f"{{{', '.join(registers)}}}" for registers in (d, a, b, d))
    return f"mma.sync.aligned.{shape}.row.col.{types} {', '.join(group)};"


def _wgmma_text(shape: str, types: str, count: int) -> str:
    """The same for wgmma, whose B is a descriptor; 16-bit types may be transposed."""
    d = ", ".join(f"${i}" for i in range(count))
    a = ", ".join(f"${i}" for i in range(count, count + 4))
    options = "1, 1, 1, 0" if shape.endswith("k16") else "1, 1, 1"
    return (
        "wgmma.fence.sync.aligned;\n"
        f"wgmma.mma_async.sync.aligned.{shape}.{types} {{{d}}}, {{{a}}}, ${count + 4}, {options};\n"
        "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;"
    )


@dsl_user_op
def _multiply(text: str, a: list, b: list, c: list, *, loc=None, ip=None) -> list:
    """One instruction on 32-bit registers; gives D."""
    values = [cutlass.Int32(x).ir_value(loc=loc, ip=ip) for x in a]
    values += [x.ir_value(loc=loc, ip=ip) for x in b]
    values += [cutlass.Int32(x).ir_value(loc=loc, ip=ip) for x in c]
    inputs = ["r"] * len(a) + ["l" if len(b) == 1 else "r"] * len(b)
    constraints = ["=r"] * len(c) + inputs + [str(i) for i in range(len(c))]
    result = llvm.inline_asm(
        llvm.StructType.get_literal([T.i32()] * len(c)), values, text, ",".join(constraints),
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc, ip=ip,
    )  # fmt: skip
    return [
        cutlass.Int32(llvm.extractvalue(T.i32(), result, [i], loc=loc, ip=ip))
        for i in range(len(c))
    ]


@cute.kernel
def _kernel(
    a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, d: cute.Tensor, text: cutlass.Constexpr
):
    """Fragments as PTX lays them out for m16n8 and m64n8; B of wgmma in two 8 x 16-byte cores."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    lane = thread % 32
    row, column = 16 * (thread // 32) + lane // 4, lane % 4
    f_a = [a[block, row + 8 * (r % 2), column + 4 * (r // 2)] for r in range(4)]
    width = cutlass.const_expr(c.shape[2] // 4)  # words of C that lie side by side in a thread
    f_c = [c[block, row + 8 * h, width * column + w] for h in range(2) for w in range(width)]
    if cutlass.const_expr(text.startswith("mma")):
        f_b = [b[block, lane // 4, column + 4 * r] for r in range(2)]
    else:
        smem = cutlass.memory.SmemAllocator()
        s_b = smem.allocate_tensor(cutlass.Int32, cute.make_layout(COLUMNS * WORDS), 128)
        if thread < COLUMNS * WORDS:
            s_b[thread] = b[block, thread // 4 % 8, thread % 4 + 4 * (thread // 32)]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        address = cutlass.Int64(s_b.iterator.toint())
        f_b = [((address >> 4) & 0x3FFF) | (128 >> 4) << 16 | (128 >> 4) << 32]
    f_d = _multiply(text, f_a, f_b, f_c)
    for h in cutlass.range_constexpr(2):
        for w in cutlass.range_constexpr(width):
            d[block, row + 8 * h, width * column + w] = f_d[width * h + w]


@cute.jit
def multiply(
    a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, d: cute.Tensor, text: cutlass.Constexpr
):
    _kernel(a, b, c, d, text).launch(grid=[a.shape[0], 1, 1], block=[128, 1, 1])


# ---- operands ----


def _bits(shape: tuple[int, ...], form: Format, low: int, high: int) -> torch.Tensor:
    """Patterns with random sign and fraction, and (unbiased) exponents in [low, high] as far as
    the format has them; one below the least stands for zero and subnormals."""
    low, high = (min(max(e, form.emin - 1), form.emax) for e in (low, high))
    exponent = torch.randint(low, high + 1, shape) - form.emin + 1
    fraction = torch.randint(0, 2**form.fraction, shape)
    if form.name == "e4m3":  # its greatest exponent holds the only NaN
        fraction -= ((exponent == 15) & (fraction == 7)).long()
    sign = torch.randint(0, 2, shape)
    return (sign << form.fraction + form.exponent) | (exponent << form.fraction) | fraction


def _sometimes(patterns: torch.Tensor, value: int, share: float) -> torch.Tensor:
    return torch.where(torch.rand(patterns.shape) < share, value, patterns)


def _packed(patterns: torch.Tensor, form: Format) -> torch.Tensor:
    kind = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[form.width]
    wrapped = torch.where(patterns >= 2**31, patterns - 2**32, patterns)
    if form.width == 16:
        wrapped = torch.where(patterns >= 2**15, patterns - 2**16, patterns)
    return wrapped.to(kind).contiguous().view(torch.int32)


def _operands(forms: Formats) -> tuple[torch.Tensor, ...]:
    """A, B and C of all blocks: eight kinds of them in turn."""
    fa, fb, fc = forms
    k = 32 * 8 // fa.width
    out: list[list[torch.Tensor]] = [[], [], []]
    for block in range(BLOCKS):
        kind = block % 8
        shapes = ((ROWS, k), (COLUMNS, k), (ROWS, COLUMNS))
        ranges = {
            1: ((-999, 999), (-999, 999), (-60, 60)),
            3: ((fa.emin - 1, fa.emin + 1), (-2, 2), (fa.emin - 4, fa.emin + 4)),
            5: ((fa.emax - 2, fa.emax), (fb.emax - 2, fb.emax), (fc.emax - 2, fc.emax)),
            7: ((-8, 0), (-8, 0), (-40, 20)),
        }.get(kind, ((-4, 0), (-4, 0), (-6, 2)))
        patterns = [_bits(s, f, *r) for s, f, r in zip(shapes, forms, ranges, strict=True)]
        if kind == 2:  # zeros
            patterns = [_sometimes(p, 0, 0.4) for p in patterns]
            patterns[1] = _bits(shapes[1], fb, -999, 999)
        if kind == 4:  # a sum that nearly cancels C
            a, b = values(_packed(patterns[0], fa), fa), values(_packed(patterns[1], fb), fb)
            cancel = torch.from_numpy(-(a @ b.T)).to(fc.dtype)
            patterns[2] = cancel.view(torch.int16 if fc.width == 16 else torch.int32).long()
            patterns[2] &= 2**fc.width - 1
        if kind == 6:  # infinities and NaNs
            patterns = [
                _sometimes(_sometimes(p, f.infinity, 0.01), f.nan, 0.002)
                for p, f in zip(patterns, forms, strict=True)
            ]
        for tensors, p, f in zip(out, patterns, forms, strict=True):
            tensors.append(_packed(p, f))
    return tuple(torch.stack(tensors) for tensors in out)


def _case(target: str, shape: str, d: str, a: str, b: str, rule: Rule) -> Case:
    forms = FORMATS[a], FORMATS[b], FORMATS[d]
    count = 4 if d == "f32" else 2
    wgmma = shape.startswith("m64")
    sums = halved_sums if not wgmma and forms[0].width == 8 else fused_sums
    types = f"{d}.{a}.{b}" if wgmma else f"{d}.{a}.{b}.{d}"
    text = (_wgmma_text if wgmma else _mma_text)(shape, types, count)
    return Case(
        f"{'wgmma' if wgmma else 'mma.sync'} {shape} {types} bits {target}", multiply,
        functools.partial(_operands, forms),
        lambda: (torch.empty(BLOCKS, ROWS, COLUMNS * count // 4, dtype=torch.int32),),
        functools.partial(sums, forms, rule), constants=(text,), target=target,
    )  # fmt: skip


WIDE, NARROW = Rule(25, 23), Rule(13, 13)
CASES = [
    *(
        _case("sm90", f"m16n8k{k}", d, a, a, WIDE)
        for k, d, a in (
            (16, "f32", "f16"), (16, "f16", "f16"), (16, "f32", "bf16"), (8, "f32", "tf32"),
            (32, "f32", "e4m3"), (32, "f32", "e5m2"),
        )
    ),
    *(
        _case("sm90", f"m64n8k{k}", d, a, b, NARROW if k == 32 else WIDE)
        for k, d, a, b in (
            (16, "f32", "f16", "f16"), (16, "f16", "f16", "f16"), (16, "f32", "bf16", "bf16"),
            (8, "f32", "tf32", "tf32"), (32, "f32", "e4m3", "e4m3"), (32, "f32", "e5m2", "e4m3"),
            (32, "f16", "e4m3", "e5m2"),
        )
    ),
]  # fmt: skip
