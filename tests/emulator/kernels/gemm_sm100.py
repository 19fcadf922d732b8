"""Matrix products on tcgen05 with one CTA: C = A B^T, accumulators in TMEM.

Roles: warps 0..3 move the accumulator from TMEM to global memory, warp 4 issues MMAs, warp 5 issues
TMA loads. Barriers and phases are written out, so that mutations can hit each of them.
"""

from __future__ import annotations

import cutlass
import cutlass.utils.blackwell_helpers as sm100
import torch
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.utils import LayoutEnum

from kernels.case import Case

EPILOGUE = 128
MMA_WARP, TMA_WARP = 4, 5
THREADS = 192


@cute.kernel
def _gemm_kernel(
    mma: cute.TiledMma,
    load_a: cute.CopyAtom,
    a: cute.Tensor,
    load_b: cute.CopyAtom,
    b: cute.Tensor,
    c: cute.Tensor,
    a_layout: cute.ComposedLayout,
    b_layout: cute.ComposedLayout,
    tile: cutlass.Constexpr,
    stages: cutlass.Constexpr,
    dtypes: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    bx, by, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    columns = cutlass.const_expr(max(32, tile[1]))
    smem = cutlass.memory.SmemAllocator()
    full = smem.allocate_array(cutlass.Int64, stages)
    empty = smem.allocate_array(cutlass.Int64, stages)
    done = smem.allocate_array(cutlass.Int64, 1)
    address = smem.allocate_array(cutlass.Int32, 1)
    s_a = smem.allocate_tensor(dtypes[0], a_layout.outer, 1024, swizzle=a_layout.inner)
    s_b = smem.allocate_tensor(dtypes[1], b_layout.outer, 1024, swizzle=b_layout.inner)

    if thread == 0:
        for stage in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, 1)
        cute.arch.mbarrier_init(done, 1)
    cute.arch.mbarrier_init_fence()
    if warp == 0:
        cute.arch.alloc_tmem(columns, address)
    cute.arch.sync_threads()
    tmem = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, address)

    g_a = cute.local_tile(a, (tile[0], tile[2]), (bx, None))
    g_b = cute.local_tile(b, (tile[1], tile[2]), (by, None))
    g_c = cute.local_tile(c, (tile[0], tile[1]), (bx, by))
    slice_ = mma.get_slice(0)
    t_a, t_b = slice_.partition_A(g_a), slice_.partition_B(g_b)
    f_a, f_b = mma.make_fragment_A(s_a), mma.make_fragment_B(s_b)
    shape = mma.partition_shape_C(tile[:2])
    acc = cute.make_tensor(tmem, mma.make_fragment_C(shape).layout)
    sp_a, gp_a = cpasync.tma_partition(
        load_a, 0, cute.make_layout(1), cute.group_modes(s_a, 0, 3), cute.group_modes(t_a, 0, 3)
    )
    sp_b, gp_b = cpasync.tma_partition(
        load_b, 0, cute.make_layout(1), cute.group_modes(s_b, 0, 3), cute.group_modes(t_b, 0, 3)
    )
    count = cute.size(g_a, mode=[2])
    bytes_ = cute.size_in_bytes(dtypes[0], cute.select(a_layout, [0, 1, 2])) + cute.size_in_bytes(
        dtypes[1], cute.select(b_layout, [0, 1, 2])
    )

    if warp == TMA_WARP:
        stage, phase = cutlass.Int32(0), cutlass.Int32(1)
        for k in cutlass.range(count):
            cute.arch.mbarrier_wait(empty + stage, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, bytes_)
            cute.copy(load_a, gp_a[(None, k)], sp_a[(None, stage)], tma_bar_ptr=full + stage)
            cute.copy(load_b, gp_b[(None, k)], sp_b[(None, stage)], tma_bar_ptr=full + stage)
            stage += 1
            if stage == stages:
                stage = cutlass.Int32(0)
                phase ^= 1
    if warp == MMA_WARP:
        stage, phase = cutlass.Int32(0), cutlass.Int32(0)
        mma.set(tcgen05.Field.ACCUMULATE, False)
        for _ in cutlass.range(count):
            cute.arch.mbarrier_wait(full + stage, phase)
            for block in cutlass.range_constexpr(cute.size(f_a, mode=[2])):
                at = (None, None, block, stage)
                cute.gemm(mma, acc, f_a[at], f_b[at], acc)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            with cute.arch.elect_one():
                tcgen05.commit(empty + stage)
            stage += 1
            if stage == stages:
                stage = cutlass.Int32(0)
                phase ^= 1
        with cute.arch.elect_one():
            tcgen05.commit(done)
    if warp < MMA_WARP:
        cute.arch.mbarrier_wait(done, 0)
        _store_accumulator(acc, slice_.partition_C(g_c), tile, thread, dtypes[2])
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(tmem, columns)


@cute.jit
def _store_accumulator(
    acc: cute.Tensor, out: cute.Tensor, tile: cutlass.Constexpr, thread: cutlass.Int32,
    dtype: cutlass.Constexpr,
):  # fmt: skip
    """TMEM -> registers -> global memory, `part` columns at a time."""
    part = cutlass.const_expr(min(tile[1], 32))
    if cutlass.const_expr(tile[0] == 64):
        operation = tcgen05.Ld16x256bOp(tcgen05.Repetition(part // 8))
    else:
        operation = tcgen05.Ld32x32bOp(tcgen05.Repetition(part))
    shape = ((tile[0], part),)
    acc_parts, out_parts = cute.zipped_divide(acc, shape), cute.zipped_divide(out, shape)
    atom = cute.make_copy_atom(operation, cutlass.Float32)
    copy = tcgen05.make_tmem_copy(atom, acc_parts[(None, 0)])
    mine = copy.get_slice(thread)
    source, target = mine.partition_S(acc_parts), mine.partition_D(out_parts)
    registers = cute.make_rmem_tensor(target[(None, None, 0)].shape, cutlass.Float32)
    rounded = cute.make_rmem_tensor(target[(None, None, 0)].shape, dtype)
    for index in cutlass.range_constexpr(cute.size(source, mode=[2])):
        cute.copy(copy, source[(None, None, index)], registers)
        rounded.store(registers.load().to(dtype))
        cute.autovec_copy(rounded, target[(None, None, index)])


@cute.jit
def gemm(
    a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, tile: cutlass.Constexpr,
    stages: cutlass.Constexpr,
):  # fmt: skip
    mma = sm100.make_trivial_tiled_mma(
        a.element_type, b.element_type, LayoutEnum.from_tensor(a).mma_major_mode(),
        LayoutEnum.from_tensor(b).mma_major_mode(), cutlass.Float32, tcgen05.CtaGroup.ONE, tile[:2],
    )  # fmt: skip
    a_layout = sm100.make_smem_layout_a(mma, tile, a.element_type, stages)
    b_layout = sm100.make_smem_layout_b(mma, tile, b.element_type, stages)
    load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    load_a, g_a = cute.nvgpu.make_tiled_tma_atom_A(
        load, a, cute.select(a_layout, [0, 1, 2]), tile, mma
    )
    load_b, g_b = cute.nvgpu.make_tiled_tma_atom_B(
        load, b, cute.select(b_layout, [0, 1, 2]), tile, mma
    )
    grid = [c.shape[0] // tile[0], c.shape[1] // tile[1], 1]
    dtypes = (a.element_type, b.element_type, c.element_type)
    _gemm_kernel(
        mma, load_a, g_a, load_b, g_b, c, a_layout, b_layout, tile, stages, dtypes
    ).launch(grid=grid, block=[THREADS, 1, 1])  # fmt: skip


def operand(rows: int, depth: int, dtype: torch.dtype, major: str = "K") -> torch.Tensor:
    """Random matrix (rows, depth), contiguous along K or along MN."""
    x = torch.randn(rows, depth)
    x = x.to(dtype)
    return x if major == "K" else x.t().contiguous().t()


def product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
    return (a.double() @ b.double().t(),)


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Clear what tf32 does not hold, so that the product is the same however it is dropped."""
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def _case(
    name: str, size: tuple[int, int, int], tile: tuple[int, int, int], dtype: torch.dtype,
    majors: str = "KK", stages: int = 2, out: torch.dtype = torch.float32,
    b_dtype: torch.dtype | None = None,
) -> Case:  # fmt: skip
    m, n, k = size

    def inputs() -> tuple[torch.Tensor, ...]:
        a = operand(m, k, dtype, "K" if majors[0] == "K" else "MN")
        b = operand(n, k, b_dtype or dtype, "K" if majors[1] == "K" else "MN")
        return (tf32(a), tf32(b)) if dtype is torch.float32 else (a, b)

    return Case(
        f"gemm {name}", gemm, inputs, lambda: (torch.empty(m, n, dtype=out),), product,
        (tile, stages), tolerance=2e-5 if out is torch.float32 else 4e-3,
    )  # fmt: skip


CASES = [
    _case("bf16", (128, 64, 320), (128, 64, 64), torch.bfloat16, stages=3),
    _case("bf16 ragged k", (128, 64, 200), (128, 64, 64), torch.bfloat16, out=torch.bfloat16),
    _case("bf16 two tiles", (256, 64, 128), (128, 32, 64), torch.bfloat16),
    _case("f16 a along m", (128, 64, 128), (128, 64, 64), torch.float16, "MK"),
    _case("f16 b along n", (128, 64, 128), (128, 64, 64), torch.float16, "KM"),
    _case("bf16 both along mn", (128, 128, 128), (128, 128, 64), torch.bfloat16, "MM"),
    _case("bf16 32B swizzle", (128, 64, 48), (128, 64, 16), torch.bfloat16),
    _case("bf16 64B swizzle", (128, 64, 96), (128, 64, 32), torch.bfloat16),
    _case("bf16 m64", (64, 64, 128), (64, 64, 64), torch.bfloat16),
    _case("bf16 n256", (128, 256, 64), (128, 256, 64), torch.bfloat16),
    _case("tf32", (128, 64, 96), (128, 64, 32), torch.float32),
    _case("e4m3", (128, 64, 256), (128, 64, 128), torch.float8_e4m3fn),
    _case("e5m2", (128, 64, 128), (128, 64, 128), torch.float8_e5m2),
    _case(
        "e4m3 by e5m2", (128, 64, 128), (128, 64, 128), torch.float8_e4m3fn,
        b_dtype=torch.float8_e5m2,
    ),
]  # fmt: skip
