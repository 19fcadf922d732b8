"""Tensor memory alone: stores and loads in every shape, and A operands that live there."""

from __future__ import annotations

import cutlass
import cutlass.utils.blackwell_helpers as sm100
import torch
from cutlass import cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.utils import LayoutEnum

from kernels.case import Case
from kernels.gemm_sm100 import operand, product

THREADS = 128
COLUMNS = 32
SHAPES = {
    "32x32b": (tcgen05.Ld32x32bOp, tcgen05.St32x32bOp, 32),
    "16x64b": (tcgen05.Ld16x64bOp, tcgen05.St16x64bOp, 16),
    "16x128b": (tcgen05.Ld16x128bOp, tcgen05.St16x128bOp, 8),
    "16x256b": (tcgen05.Ld16x256bOp, tcgen05.St16x256bOp, 4),
}


@cute.kernel
def _round_trip_kernel(source: cute.Tensor, target: cute.Tensor, shapes: cutlass.Constexpr):
    """Store in one shape, load in another: values land where CuTe's layouts say."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = cutlass.memory.SmemAllocator()
    address = smem.allocate_array(cutlass.Int32, 1)
    if warp == 0:
        cute.arch.alloc_tmem(COLUMNS, address)
    cute.arch.sync_threads()
    pointer = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, address)
    tmem = cute.make_tensor(pointer, cute.make_layout((128, COLUMNS), stride=(65536, 1)))

    _, store, repeat = SHAPES[shapes[0]]
    atom = cute.make_copy_atom(store(tcgen05.Repetition(repeat)), cutlass.Float32)
    copy = tcgen05.make_tmem_copy(atom, tmem)
    mine = copy.get_slice(thread)
    given = mine.partition_S(source)
    registers = cute.make_rmem_tensor(given.shape, cutlass.Float32)
    cute.autovec_copy(given, registers)
    cute.copy(copy, registers, mine.partition_D(tmem))
    cute.arch.fence_view_async_tmem_store()
    cute.arch.sync_threads()

    load, _, repeat = SHAPES[shapes[1]]
    atom = cute.make_copy_atom(load(tcgen05.Repetition(repeat)), cutlass.Float32)
    copy = tcgen05.make_tmem_copy(atom, tmem)
    mine = copy.get_slice(thread)
    wanted = mine.partition_D(target)
    registers = cute.make_rmem_tensor(wanted.shape, cutlass.Float32)
    cute.copy(copy, mine.partition_S(tmem), registers)
    cute.arch.fence_view_async_tmem_load()
    cute.autovec_copy(registers, wanted)
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(pointer, COLUMNS)


@cute.jit
def round_trip(source: cute.Tensor, target: cute.Tensor, shapes: cutlass.Constexpr):
    _round_trip_kernel(source, target, shapes).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def _from_shared_kernel(source: cute.Tensor, target: cute.Tensor, layout: cute.ComposedLayout):
    """tcgen05.cp 128x256b: shared memory (core matrices, no swizzle) to tensor memory."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = cutlass.memory.SmemAllocator()
    done = smem.allocate_array(cutlass.Int64, 1)
    address = smem.allocate_array(cutlass.Int32, 1)
    staged = smem.allocate_tensor(cutlass.Float32, layout.outer, 1024, swizzle=layout.inner)
    if thread == 0:
        cute.arch.mbarrier_init(done, 1)
    cute.arch.mbarrier_init_fence()
    if warp == 0:
        cute.arch.alloc_tmem(COLUMNS, address)
    for column in cutlass.range_constexpr(8):
        staged[thread, column] = source[thread, column]
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    pointer = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, address)
    tmem = cute.make_tensor(pointer, cute.make_layout((128, 8), stride=(65536, 1)))
    if warp == 0:
        atom = cute.make_copy_atom(tcgen05.Cp128x256bOp(tcgen05.CtaGroup.ONE), cutlass.Float32)
        copy = tcgen05.make_s2t_copy(atom, tmem)
        mine = copy.get_slice(0)
        given = tcgen05.get_s2t_smem_desc_tensor(copy, mine.partition_S(staged))
        cute.copy(copy, given, mine.partition_D(tmem))
        with cute.arch.elect_one():
            tcgen05.commit(done)
    cute.arch.mbarrier_wait(done, 0)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(8)), cutlass.Float32)
    copy = tcgen05.make_tmem_copy(atom, tmem)
    mine = copy.get_slice(thread)
    wanted = mine.partition_D(target)
    registers = cute.make_rmem_tensor(wanted.shape, cutlass.Float32)
    cute.copy(copy, mine.partition_S(tmem), registers)
    cute.autovec_copy(registers, wanted)
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(pointer, COLUMNS)


@cute.jit
def from_shared(source: cute.Tensor, target: cute.Tensor):
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_INTER, cutlass.Float32)
    layout = cute.tile_to_shape(atom, (128, 8), (0, 1))
    _from_shared_kernel(source, target, layout).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def _tmem_operand_kernel(
    mma: cute.TiledMma, a: cute.Tensor, load_b: cute.CopyAtom, b: cute.Tensor, c: cute.Tensor,
    a_layout: cute.ComposedLayout, b_layout: cute.ComposedLayout, tile: cutlass.Constexpr,
):  # fmt: skip
    """One k tile; every thread writes its row of A into TMEM, packed two values a column."""
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    dtype = a.element_type
    a_columns = cutlass.const_expr(tile[2] * dtype.width // 32)
    columns = cutlass.const_expr(128)
    smem = cutlass.memory.SmemAllocator()
    loaded = smem.allocate_array(cutlass.Int64, 1)
    done = smem.allocate_array(cutlass.Int64, 1)
    address = smem.allocate_array(cutlass.Int32, 1)
    s_b = smem.allocate_tensor(dtype, b_layout.outer, 1024, swizzle=b_layout.inner)
    if thread == 0:
        cute.arch.mbarrier_init(loaded, 1)
        cute.arch.mbarrier_init(done, 1)
    cute.arch.mbarrier_init_fence()
    if warp == 0:
        cute.arch.alloc_tmem(columns, address)
    cute.arch.sync_threads()
    pointer = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, address)
    acc = cute.make_tensor(pointer, mma.make_fragment_C(mma.partition_shape_C(tile[:2])).layout)

    g_b = cute.local_tile(b, (tile[1], tile[2]), (0, None))
    f_b = mma.make_fragment_B(s_b)
    sp_b, gp_b = cpasync.tma_partition(
        load_b, 0, cute.make_layout(1), cute.group_modes(s_b, 0, 3),
        cute.group_modes(mma.get_slice(0).partition_B(g_b), 0, 3),
    )  # fmt: skip
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                loaded, cute.size_in_bytes(dtype, cute.select(b_layout, [0, 1, 2]))
            )
        cute.copy(load_b, gp_b[(None, 0)], sp_b[(None, 0)], tma_bar_ptr=loaded)

    row = cute.make_rmem_tensor(cute.make_layout(tile[2]), dtype)
    cute.autovec_copy(a[(thread, None)], row)
    words = cute.recast_tensor(row, cutlass.Float32)
    place = cute.make_tensor(
        pointer + tile[1], cute.make_layout((128, a_columns), stride=(65536, 1))
    )
    atom = cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition(a_columns)), cutlass.Float32)
    copy = tcgen05.make_tmem_copy(atom, place)
    target = copy.get_slice(thread).partition_D(place)
    packed = cute.make_rmem_tensor(
        copy.get_slice(thread).partition_S(cute.make_identity_tensor((128, a_columns))).shape,
        cutlass.Float32,
    )
    packed.store(cute.make_tensor(words.iterator, packed.layout).load())
    cute.copy(copy, packed, target)
    cute.arch.fence_view_async_tmem_store()
    cute.arch.sync_threads()

    if warp == 0:
        cute.arch.mbarrier_wait(loaded, 0)
        f_a = mma.make_fragment_A(cute.make_tensor(pointer, a_layout.outer))
        # the fragment's own pointer has lost where tensor memory was allocated
        f_a = cute.make_tensor(cute.recast_ptr(pointer + tile[1], dtype=dtype), f_a.layout)
        mma.set(tcgen05.Field.ACCUMULATE, False)
        for block in cutlass.range_constexpr(cute.size(f_a, mode=[2])):
            at = (None, None, block, 0)
            cute.gemm(mma, acc, f_a[at], f_b[at], acc)
            mma.set(tcgen05.Field.ACCUMULATE, True)
        with cute.arch.elect_one():
            tcgen05.commit(done)
    cute.arch.mbarrier_wait(done, 0)
    out = cute.make_tensor(pointer, cute.make_layout((128, tile[1]), stride=(65536, 1)))
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(tile[1])), cutlass.Float32)
    copy = tcgen05.make_tmem_copy(atom, out)
    mine = copy.get_slice(thread)
    wanted = mine.partition_D(c)
    registers = cute.make_rmem_tensor(wanted.shape, cutlass.Float32)
    cute.copy(copy, mine.partition_S(out), registers)
    cute.autovec_copy(registers, wanted)
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(pointer, columns)


@cute.jit
def tmem_operand(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, tile: cutlass.Constexpr):
    mma = sm100.make_trivial_tiled_mma(
        a.element_type, b.element_type, LayoutEnum.from_tensor(a).mma_major_mode(),
        LayoutEnum.from_tensor(b).mma_major_mode(), cutlass.Float32, tcgen05.CtaGroup.ONE, tile[:2],
        tcgen05.OperandSource.TMEM,
    )  # fmt: skip
    a_layout = sm100.make_smem_layout_a(mma, tile, a.element_type, 1)
    b_layout = sm100.make_smem_layout_b(mma, tile, b.element_type, 1)
    load_b, g_b = cute.nvgpu.make_tiled_tma_atom_B(
        cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE), b,
        cute.select(b_layout, [0, 1, 2]), tile, mma,
    )  # fmt: skip
    _tmem_operand_kernel(mma, a, load_b, g_b, c, a_layout, b_layout, tile).launch(
        grid=[1, 1, 1], block=[THREADS, 1, 1]
    )


def _round_trip_case(store: str, load: str) -> Case:
    return Case(
        f"tmem {store} to {load}", round_trip, lambda: (torch.randn(128, COLUMNS),),
        lambda: (torch.empty(128, COLUMNS),), lambda x: (x,), ((store, load),),
    )  # fmt: skip


def _operand_case(name: str, depth: int, dtype: torch.dtype, n: int = 64) -> Case:
    return Case(
        f"gemm a from tmem {name}", tmem_operand,
        lambda: (operand(128, depth, dtype), operand(n, depth, dtype)),
        lambda: (torch.empty(128, n),), product, ((128, n, depth),), tolerance=2e-5,
    )  # fmt: skip


CASES = [
    *(_round_trip_case("32x32b", shape) for shape in SHAPES),
    *(_round_trip_case(shape, "32x32b") for shape in SHAPES if shape != "32x32b"),
    Case(
        "tmem from shared memory", from_shared, lambda: (torch.randn(128, 8),),
        lambda: (torch.empty(128, 8),), lambda x: (x,),
    ),
    _operand_case("bf16", 64, torch.bfloat16),
    _operand_case("f16", 32, torch.float16, 32),
    _operand_case("e4m3", 128, torch.float8_e4m3fn),
]  # fmt: skip
