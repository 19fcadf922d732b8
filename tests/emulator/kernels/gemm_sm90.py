"""Matrix products on Hopper's wgmma, operands from shared memory or A from registers."""

from __future__ import annotations

import cutlass
import cutlass.utils.hopper_helpers as sm90
import torch
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import LayoutEnum

from kernels.case import Case
from kernels.gemm_sm100 import operand, product

GROUP = 128
PRODUCER = GROUP // 32


@cute.kernel
def _wgmma_kernel(
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
    """Warp 4 loads, warps 0..3 multiply and store; A and B from shared memory."""
    thread, _, _ = cute.arch.thread_idx()
    bx, by, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = cutlass.memory.SmemAllocator()
    full = smem.allocate_array(cutlass.Int64, stages)
    empty = smem.allocate_array(cutlass.Int64, stages)
    s_a = smem.allocate_tensor(dtypes[0], a_layout.outer, 1024, swizzle=a_layout.inner)
    s_b = smem.allocate_tensor(dtypes[1], b_layout.outer, 1024, swizzle=b_layout.inner)
    if thread == 0:
        for stage in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, GROUP)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    g_a = cute.local_tile(a, (tile[0], tile[2]), (bx, None))
    g_b = cute.local_tile(b, (tile[1], tile[2]), (by, None))
    g_c = cute.local_tile(c, (tile[0], tile[1]), (bx, by))
    sp_a, gp_a = cpasync.tma_partition(
        load_a, 0, cute.make_layout(1), cute.group_modes(s_a, 0, 2), cute.group_modes(g_a, 0, 2)
    )
    sp_b, gp_b = cpasync.tma_partition(
        load_b, 0, cute.make_layout(1), cute.group_modes(s_b, 0, 2), cute.group_modes(g_b, 0, 2)
    )
    count = cute.size(g_a, mode=[2])
    bytes_ = cute.size_in_bytes(dtypes[0], cute.select(a_layout, [0, 1])) + cute.size_in_bytes(
        dtypes[1], cute.select(b_layout, [0, 1])
    )
    if warp == PRODUCER:
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
    else:
        group = mma.get_slice(0)
        f_a = mma.make_fragment_A(group.partition_A(s_a))
        f_b = mma.make_fragment_B(group.partition_B(s_b))
        acc = cute.make_rmem_tensor(mma.partition_shape_C(tile[:2]), cutlass.Float32)
        stage, phase = cutlass.Int32(0), cutlass.Int32(0)
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for _ in cutlass.range(count):
            cute.arch.mbarrier_wait(full + stage, phase)
            warpgroup.fence()
            for block in cutlass.range_constexpr(cute.size(f_a, mode=[2])):
                at = (None, None, block, stage)
                cute.gemm(mma, acc, f_a[at], f_b[at], acc)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            cute.arch.mbarrier_arrive(empty + stage)
            stage += 1
            if stage == stages:
                stage = cutlass.Int32(0)
                phase ^= 1
        out = mma.get_slice(thread).partition_C(g_c)
        rounded = cute.make_rmem_tensor(out.shape, dtypes[2])
        rounded.store(acc.load().to(dtypes[2]))
        cute.autovec_copy(rounded, out)


def _layouts(a, b, tile, stages):
    a_layout = sm90.make_smem_layout_a(LayoutEnum.from_tensor(a), tile, a.element_type, stages)
    b_layout = sm90.make_smem_layout_b(LayoutEnum.from_tensor(b), tile, b.element_type, stages)
    return a_layout, b_layout


@cute.jit
def gemm(
    a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, tile: cutlass.Constexpr,
    stages: cutlass.Constexpr,
):  # fmt: skip
    mma = sm90.make_trivial_tiled_mma(
        a.element_type, b.element_type, LayoutEnum.from_tensor(a).sm90_mma_major_mode(),
        LayoutEnum.from_tensor(b).sm90_mma_major_mode(), cutlass.Float32, (1, 1, 1),
        (64, tile[1]),
    )  # fmt: skip
    a_layout, b_layout = _layouts(a, b, tile, stages)
    load = cpasync.CopyBulkTensorTileG2SOp()
    load_a, g_a = cpasync.make_tiled_tma_atom(
        load, a, cute.select(a_layout, [0, 1]), (tile[0], tile[2])
    )
    load_b, g_b = cpasync.make_tiled_tma_atom(
        load, b, cute.select(b_layout, [0, 1]), (tile[1], tile[2])
    )
    grid = [c.shape[0] // tile[0], c.shape[1] // tile[1], 1]
    dtypes = (a.element_type, b.element_type, c.element_type)
    _wgmma_kernel(
        mma, load_a, g_a, load_b, g_b, c, a_layout, b_layout, tile, stages, dtypes
    ).launch(grid=grid, block=[GROUP + 32, 1, 1])  # fmt: skip


@cute.kernel
def _register_kernel(
    mma: cute.TiledMma, a: cute.Tensor, load_b: cute.CopyAtom, b: cute.Tensor, c: cute.Tensor,
    b_layout: cute.ComposedLayout, tile: cutlass.Constexpr,
):  # fmt: skip
    """A goes from global memory straight into registers."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = cutlass.memory.SmemAllocator()
    full = smem.allocate_array(cutlass.Int64, 1)
    s_b = smem.allocate_tensor(a.element_type, b_layout.outer, 1024, swizzle=b_layout.inner)
    if thread == 0:
        cute.arch.mbarrier_init(full, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    g_b = cute.local_tile(b, (tile[1], tile[2]), (0, None))
    sp_b, gp_b = cpasync.tma_partition(
        load_b, 0, cute.make_layout(1), cute.group_modes(s_b, 0, 2), cute.group_modes(g_b, 0, 2)
    )
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                full, cute.size_in_bytes(a.element_type, cute.select(b_layout, [0, 1]))
            )
        cute.copy(load_b, gp_b[(None, 0)], sp_b[(None, 0)], tma_bar_ptr=full)
    mine = mma.get_slice(thread)
    given = mine.partition_A(a)
    f_a = mma.make_fragment_A(given.shape)
    cute.autovec_copy(given, f_a)
    f_b = mma.make_fragment_B(mma.get_slice(0).partition_B(s_b))
    acc = cute.make_rmem_tensor(mma.partition_shape_C(tile[:2]), cutlass.Float32)
    cute.arch.mbarrier_wait(full, 0)
    mma.set(warpgroup.Field.ACCUMULATE, False)
    warpgroup.fence()
    for block in cutlass.range_constexpr(cute.size(f_a, mode=[2])):
        cute.gemm(mma, acc, f_a[(None, None, block)], f_b[(None, None, block, 0)], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    cute.autovec_copy(acc, mine.partition_C(c))


@cute.jit
def register_gemm(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, tile: cutlass.Constexpr):
    mma = sm90.make_trivial_tiled_mma(
        a.element_type, b.element_type, LayoutEnum.from_tensor(a).sm90_mma_major_mode(),
        LayoutEnum.from_tensor(b).sm90_mma_major_mode(), cutlass.Float32, (1, 1, 1),
        (64, tile[1]), warpgroup.OperandSource.RMEM,
    )  # fmt: skip
    _, b_layout = _layouts(a, b, tile, 1)
    load_b, g_b = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), b, cute.select(b_layout, [0, 1]), (tile[1], tile[2])
    )
    _register_kernel(mma, a, load_b, g_b, c, b_layout, tile).launch(
        grid=[1, 1, 1], block=[GROUP, 1, 1]
    )


def _case(
    name: str, size: tuple[int, int, int], tile: tuple[int, int, int], dtype: torch.dtype,
    majors: str = "KK", out: torch.dtype = torch.float32,
) -> Case:  # fmt: skip
    m, n, k = size
    tolerance = 2e-5 if out is torch.float32 else 4e-3
    if dtype is torch.float8_e4m3fn:
        tolerance = 2e-3  # sums of 8-bit products have 13 fraction bits
    return Case(
        f"wgmma {name}", gemm,
        lambda: (operand(m, k, dtype, majors[0]), operand(n, k, dtype, majors[1])),
        lambda: (torch.empty(m, n, dtype=out),), product, (tile, 2), "sm90",
        tolerance,
    )  # fmt: skip


CASES = [
    _case("bf16", (64, 64, 200), (64, 64, 64), torch.bfloat16),
    _case("f16 128 rows", (128, 32, 128), (128, 32, 64), torch.float16, out=torch.float16),
    _case("bf16 a along m", (64, 64, 128), (64, 64, 64), torch.bfloat16, "MK"),
    _case("bf16 b along n", (64, 128, 128), (64, 128, 64), torch.bfloat16, "KM"),
    _case("e4m3", (64, 64, 128), (64, 64, 128), torch.float8_e4m3fn),
    Case(
        "wgmma a from registers", register_gemm,
        lambda: (operand(64, 64, torch.bfloat16), operand(64, 64, torch.bfloat16)),
        lambda: (torch.empty(64, 64),), product, ((64, 64, 64),), "sm90", 2e-5,
    ),
]  # fmt: skip
