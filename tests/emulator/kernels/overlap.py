"""One accumulator used again and again: loading it must be over before the next product begins.

One CTA walks along N. Its MMA warp waits until the epilogue has taken the previous tile out of
TMEM; the epilogue warpgroup takes registers from the others (setmaxnreg), as real kernels do.
"""

from __future__ import annotations

import cutlass
import cutlass.utils.blackwell_helpers as sm100
import torch
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.utils import LayoutEnum

from kernels.case import Case
from kernels.gemm_sm100 import operand, product

EPILOGUE, MMA_WARP, TMA_WARP, THREADS = 128, 4, 5, 512
STAGES, COLUMNS = 2, 32


@cute.kernel
def _walk_kernel(
    mma: cute.TiledMma,
    load_a: cute.CopyAtom,
    a: cute.Tensor,
    load_b: cute.CopyAtom,
    b: cute.Tensor,
    c: cute.Tensor,
    a_layout: cute.ComposedLayout,
    b_layout: cute.ComposedLayout,
    tile: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = cutlass.memory.SmemAllocator()
    a_full = smem.allocate_array(cutlass.Int64, 1)
    b_full = smem.allocate_array(cutlass.Int64, STAGES)
    b_empty = smem.allocate_array(cutlass.Int64, STAGES)
    acc_full = smem.allocate_array(cutlass.Int64, 1)
    acc_empty = smem.allocate_array(cutlass.Int64, 1)
    address = smem.allocate_array(cutlass.Int32, 1)
    s_a = smem.allocate_tensor(dtype, a_layout.outer, 1024, swizzle=a_layout.inner)
    s_b = smem.allocate_tensor(dtype, b_layout.outer, 1024, swizzle=b_layout.inner)
    if thread == 0:
        cute.arch.mbarrier_init(a_full, 1)
        for stage in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(b_full + stage, 1)
            cute.arch.mbarrier_init(b_empty + stage, 1)
        cute.arch.mbarrier_init(acc_full, 1)
        cute.arch.mbarrier_init(acc_empty, EPILOGUE)
    cute.arch.mbarrier_init_fence()
    if warp == 0:
        cute.arch.alloc_tmem(COLUMNS, address)
    cute.arch.sync_threads()
    pointer = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, address)

    g_a = cute.local_tile(a, (tile[0], tile[2]), (0, 0))
    g_b = cute.local_tile(b, (tile[1], tile[2]), (None, 0))
    g_c = cute.local_tile(c, (tile[0], tile[1]), (0, None))
    slice_ = mma.get_slice(0)
    f_a, f_b = mma.make_fragment_A(s_a), mma.make_fragment_B(s_b)
    acc = cute.make_tensor(pointer, mma.make_fragment_C(mma.partition_shape_C(tile[:2])).layout)
    sp_a, gp_a = cpasync.tma_partition(
        load_a, 0, cute.make_layout(1), cute.group_modes(s_a, 0, 3),
        cute.group_modes(slice_.partition_A(g_a), 0, 3),
    )  # fmt: skip
    sp_b, gp_b = cpasync.tma_partition(
        load_b, 0, cute.make_layout(1), cute.group_modes(s_b, 0, 3),
        cute.group_modes(slice_.partition_B(g_b), 0, 3),
    )  # fmt: skip
    count = cute.size(g_b, mode=[2])

    if warp >= MMA_WARP:
        cute.arch.setmaxregister_decrease(88)
    else:
        cute.arch.setmaxregister_increase(208)
    if warp == TMA_WARP:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(a_full, tile[0] * tile[2] * dtype.width // 8)
        cute.copy(load_a, gp_a, sp_a[(None, 0)], tma_bar_ptr=a_full)
        for n in cutlass.range(count):
            stage = n % STAGES
            cute.arch.mbarrier_wait(b_empty + stage, (n // STAGES + 1) % 2)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(
                    b_full + stage, tile[1] * tile[2] * dtype.width // 8
                )
            cute.copy(load_b, gp_b[(None, n)], sp_b[(None, stage)], tma_bar_ptr=b_full + stage)
    if warp == MMA_WARP:
        cute.arch.mbarrier_wait(a_full, 0)
        for n in cutlass.range(count):
            stage = n % STAGES
            cute.arch.mbarrier_wait(b_full + stage, n // STAGES % 2)
            cute.arch.mbarrier_wait(acc_empty, (n + 1) % 2)
            mma.set(tcgen05.Field.ACCUMULATE, False)
            for block in cutlass.range_constexpr(cute.size(f_a, mode=[2])):
                cute.gemm(
                    mma, acc, f_a[(None, None, block, 0)], f_b[(None, None, block, stage)], acc
                )
                mma.set(tcgen05.Field.ACCUMULATE, True)
            with cute.arch.elect_one():
                tcgen05.commit(b_empty + stage)
                tcgen05.commit(acc_full)
    if warp < MMA_WARP:
        whole = cute.make_tensor(pointer, cute.make_layout((128, tile[1]), stride=(65536, 1)))
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(tile[1])), cutlass.Float32)
        copy = tcgen05.make_tmem_copy(atom, whole)
        mine = copy.get_slice(thread)
        source, targets = mine.partition_S(whole), mine.partition_D(g_c)
        registers = cute.make_rmem_tensor(targets[(None, None, None, 0)].shape, cutlass.Float32)
        for n in cutlass.range(count):
            cute.arch.mbarrier_wait(acc_full, n % 2)
            cute.copy(copy, source, registers)
            cute.arch.fence_view_async_tmem_load()
            cute.arch.mbarrier_arrive(acc_empty)
            cute.autovec_copy(registers, targets[(None, None, None, n)])
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(pointer, COLUMNS)


@cute.jit
def walk(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, tile: cutlass.Constexpr):
    mma = sm100.make_trivial_tiled_mma(
        a.element_type, b.element_type, LayoutEnum.from_tensor(a).mma_major_mode(),
        LayoutEnum.from_tensor(b).mma_major_mode(), cutlass.Float32, tcgen05.CtaGroup.ONE, tile[:2],
    )  # fmt: skip
    a_layout = sm100.make_smem_layout_a(mma, tile, a.element_type, 1)
    b_layout = sm100.make_smem_layout_b(mma, tile, b.element_type, STAGES)
    load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    load_a, g_a = cute.nvgpu.make_tiled_tma_atom_A(
        load, a, cute.select(a_layout, [0, 1, 2]), tile, mma
    )
    load_b, g_b = cute.nvgpu.make_tiled_tma_atom_B(
        load, b, cute.select(b_layout, [0, 1, 2]), tile, mma
    )
    _walk_kernel(
        mma, load_a, g_a, load_b, g_b, c, a_layout, b_layout, tile, a.element_type
    ).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])  # fmt: skip


CASES = [
    Case(
        "gemm one accumulator", walk,
        lambda: (operand(128, 64, torch.bfloat16), operand(160, 64, torch.bfloat16)),
        lambda: (torch.empty(128, 160),), product, ((128, 32, 64),), tolerance=2e-5,
    )
]  # fmt: skip
