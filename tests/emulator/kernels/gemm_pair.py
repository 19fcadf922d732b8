"""Matrix products on pairs of CTAs (cta_group::2), with multicast, and with K split.

Uses the DSL's own pipeline classes, as real kernels do: TMA into both CTAs of a pair on the
leader's barrier, MMA by the leader, commits multicast to every CTA whose buffers were read, results
through shared memory and TMA stores.
"""

from __future__ import annotations

import cutlass
import cutlass.utils.blackwell_helpers as sm100
import torch
from cutlass import cute, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import TmemAllocator
from cutlass.utils import LayoutEnum

from kernels.case import Case
from kernels.gemm_sm100 import operand, product

EPILOGUE_WARPS, MMA_WARP, TMA_WARP = 4, 4, 5
THREADS = 192
STAGES = 2


@cute.kernel
def _pair_kernel(
    mma: cute.TiledMma,
    load_a: cute.CopyAtom,
    a: cute.Tensor,
    load_b: cute.CopyAtom,
    b: cute.Tensor,
    store: cute.CopyAtom,
    c: cute.Tensor,
    a_layout: cute.ComposedLayout,
    b_layout: cute.ComposedLayout,
    c_layout: cute.ComposedLayout,
    cluster: cute.Layout,
    config: cutlass.Constexpr,
):
    tile, columns, part, dtype, splits = config
    thread, _, _ = cute.arch.thread_idx()
    bx, by, split = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    place = cluster.get_flat_coord(rank)
    pair = cutlass.const_expr(cute.size(cluster, mode=[0]))
    leader = bx % pair == 0
    at = (bx // pair, by, None)

    smem = cutlass.memory.SmemAllocator()
    operand_barriers = smem.allocate_array(cutlass.Int64, 2 * STAGES)
    result_barriers = smem.allocate_array(cutlass.Int64, 2)
    free = smem.allocate_array(cutlass.Int64, 1)
    address = smem.allocate_array(cutlass.Int32, 1)
    s_a = smem.allocate_tensor(dtype, a_layout.outer, 1024, swizzle=a_layout.inner)
    s_b = smem.allocate_tensor(dtype, b_layout.outer, 1024, swizzle=b_layout.inner)
    s_c = smem.allocate_tensor(cutlass.Float32, c_layout.outer, 1024, swizzle=c_layout.inner)

    # before the pipelines, whose creation ends in a cluster barrier: peers arrive at `free`
    tmem = TmemAllocator(
        address,
        barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=2, num_threads=160),
        allocator_warp_id=0,
        is_two_cta=pair == 2,
        two_cta_tmem_dealloc_mbar_ptr=free,
    )
    sharing = cute.size(cluster, mode=[1]) + cute.size(cluster, mode=[2]) - 1
    bytes_ = pair * (
        cute.size_in_bytes(dtype, cute.select(a_layout, [0, 1, 2]))
        + cute.size_in_bytes(dtype, cute.select(b_layout, [0, 1, 2]))
    )
    fill, drain = pipeline.PipelineTmaUmma.create(
        barrier_storage=operand_barriers,
        num_stages=STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, sharing),
        tx_count=bytes_,
        cta_layout_vmnk=cluster,
    ).make_participants()
    finish, collect = pipeline.PipelineUmmaAsync.create(
        barrier_storage=result_barriers,
        num_stages=1,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, pair * EPILOGUE_WARPS),
        cta_layout_vmnk=cluster,
    ).make_participants()
    g_a = cute.local_tile(a, tile, at, proj=(1, None, 1))
    g_b = cute.local_tile(b, tile, at, proj=(None, 1, 1))
    g_c = cute.local_tile(c, tile, at, proj=(1, 1, None))
    slice_ = mma.get_slice(bx % pair)
    t_a, t_b, t_c = slice_.partition_A(g_a), slice_.partition_B(g_b), slice_.partition_C(g_c)
    f_a, f_b = mma.make_fragment_A(s_a), mma.make_fragment_B(s_b)
    acc_layout = mma.make_fragment_C(mma.partition_shape_C(tile[:2])).layout
    sp_a, gp_a = cpasync.tma_partition(
        load_a, place[2], cute.make_layout(cute.size(cluster, mode=[2])),
        cute.group_modes(s_a, 0, 3), cute.group_modes(t_a, 0, 3),
    )  # fmt: skip
    sp_b, gp_b = cpasync.tma_partition(
        load_b, place[1], cute.make_layout(cute.size(cluster, mode=[1])),
        cute.group_modes(s_b, 0, 3), cute.group_modes(t_b, 0, 3),
    )  # fmt: skip
    count = cute.size(g_a, mode=[2]) // splits
    first = split * count

    if warp == TMA_WARP:
        mask_a = cpasync.create_tma_multicast_mask(cluster, place, mcast_mode=2)
        mask_b = cpasync.create_tma_multicast_mask(cluster, place, mcast_mode=1)
        for k in cutlass.range(count):
            slot = fill.acquire_and_advance()
            cute.copy(load_a, gp_a[(None, first + k)], sp_a[(None, slot.index)],
                      tma_bar_ptr=slot.barrier, mcast_mask=mask_a)  # fmt: skip
            cute.copy(load_b, gp_b[(None, first + k)], sp_b[(None, slot.index)],
                      tma_bar_ptr=slot.barrier, mcast_mask=mask_b)  # fmt: skip
        fill.tail()
    elif warp == MMA_WARP:
        tmem.wait_for_alloc()
        acc = cute.make_tensor(tmem.retrieve_ptr(cutlass.Float32), acc_layout)
        if leader:
            result = finish.acquire_and_advance()
            for _ in cutlass.range(count):
                slot = drain.wait_and_advance()
                for block in cutlass.range_constexpr(cute.size(f_a, mode=[2])):
                    index = (None, None, block, slot.index)
                    cute.gemm(mma, acc, f_a[index], f_b[index], acc)
                    mma.set(tcgen05.Field.ACCUMULATE, True)
                slot.release()
            result.commit()
    elif warp < MMA_WARP:
        tmem.allocate(columns)
        tmem.wait_for_alloc()
        pointer = tmem.retrieve_ptr(cutlass.Float32)
        acc = cute.make_tensor(pointer, acc_layout)
        collect.wait_and_advance()
        _store_by_tma(store, acc, t_c, s_c, part, thread, warp, tile)
        tmem.relinquish_alloc_permit()
        tmem.free(pointer)


@cute.jit
def _store_by_tma(
    store: cute.CopyAtom, acc: cute.Tensor, t_c: cute.Tensor, s_c: cute.Tensor,
    part: cutlass.Constexpr, thread: cutlass.Int32, warp: cutlass.Int32, tile: cutlass.Constexpr,
):  # fmt: skip
    """TMEM -> registers -> shared memory -> TMA store, one `part` of the tile at a time."""
    together = pipeline.NamedBarrier(barrier_id=1, num_threads=128)
    stores = pipeline.PipelineTmaStore.create(
        num_stages=1, producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 128)
    )
    acc_parts = cute.flat_divide(acc[((None, None), 0, 0)], part)
    out_parts = cute.flat_divide(t_c[((None, None), 0, 0)], part)
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(32)), cutlass.Float32)
    copy = tcgen05.make_tmem_copy(atom, acc_parts[(None, None, 0, 0)])
    mine = copy.get_slice(thread)
    source = cute.group_modes(mine.partition_S(acc_parts), 3, 5)
    staged = mine.partition_D(s_c)
    s_p, g_p = cpasync.tma_partition(
        store, 0, cute.make_layout(1), cute.group_modes(s_c, 0, 2),
        cute.group_modes(out_parts, 0, 2),
    )  # fmt: skip
    g_p = cute.group_modes(g_p, 1, 3)
    registers = cute.make_rmem_tensor(staged[(None, None, None, 0)].shape, cutlass.Float32)
    for index in cutlass.range_constexpr(cute.size(source, mode=[3])):
        cute.copy(copy, source[(None, None, None, index)], registers)
        cute.autovec_copy(registers, staged[(None, None, None, 0)])
        cute.arch.fence_proxy("async.shared", space="cta")
        together.arrive_and_wait()
        if warp == 0:
            cute.copy(store, s_p[(None, 0)], g_p[(None, index)])
            stores.producer_commit()
            stores.producer_acquire()
        together.arrive_and_wait()
    if warp == 0:
        stores.producer_tail()


@cute.kernel
def _clear_kernel(c: cute.Tensor):
    lane, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    for column in cutlass.range(lane, c.shape[1], 32):
        c[row, column] = cutlass.Float32(0.0)


@cute.jit
def gemm(
    a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, tile: cutlass.Constexpr,
    cluster: cutlass.Constexpr, pair: cutlass.Constexpr, splits: cutlass.Constexpr,
):  # fmt: skip
    """With splits, each CTA takes a part of K and adds its result to C, which is cleared first."""
    group = tcgen05.CtaGroup.TWO if pair == 2 else tcgen05.CtaGroup.ONE
    mma = sm100.make_trivial_tiled_mma(
        a.element_type, b.element_type, LayoutEnum.from_tensor(a).mma_major_mode(),
        LayoutEnum.from_tensor(b).mma_major_mode(), cutlass.Float32, group, tile[:2],
    )  # fmt: skip
    a_layout = sm100.make_smem_layout_a(mma, tile, a.element_type, STAGES)
    b_layout = sm100.make_smem_layout_b(mma, tile, b.element_type, STAGES)
    ctas = cute.tiled_divide(cute.make_layout((*cluster, 1)), (mma.thr_id.shape,))
    shape = (tile[0] // pair, tile[1])
    part = (shape[0], 32)
    c_layout = sm100.make_smem_layout_epi(cutlass.Float32, LayoutEnum.ROW_MAJOR, part, 1)
    load_a, g_a = cute.nvgpu.make_tiled_tma_atom_A(
        sm100.cluster_shape_to_tma_atom_A((*cluster,), mma.thr_id), a,
        cute.select(a_layout, [0, 1, 2]), tile, mma, ctas.shape,
    )  # fmt: skip
    load_b, g_b = cute.nvgpu.make_tiled_tma_atom_B(
        sm100.cluster_shape_to_tma_atom_B((*cluster,), mma.thr_id), b,
        cute.select(b_layout, [0, 1, 2]), tile, mma, ctas.shape,
    )  # fmt: skip
    if cutlass.const_expr(splits > 1):
        _clear_kernel(c).launch(grid=[c.shape[0], 1, 1], block=[32, 1, 1])
        operation = cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind.ADD)
    else:
        operation = cpasync.CopyBulkTensorTileS2GOp()
    store, g_c = cpasync.make_tiled_tma_atom(operation, c, cute.select(c_layout, [0, 1]), part)
    grid = [c.shape[0] // shape[0], c.shape[1] // tile[1], splits]
    config = (tile, max(32, tile[1]), part, a.element_type, splits)
    _pair_kernel(
        mma, load_a, g_a, load_b, g_b, store, g_c, a_layout, b_layout, c_layout, ctas, config
    ).launch(grid=grid, block=[THREADS, 1, 1], cluster=[*cluster, 1])  # fmt: skip


def _case(
    name: str, size: tuple[int, int, int], tile: tuple[int, int, int], cluster: tuple[int, int],
    pair: int, dtype: torch.dtype = torch.bfloat16, majors: str = "KK", splits: int = 1,
) -> Case:  # fmt: skip
    m, n, k = size
    return Case(
        f"gemm {name}", gemm,
        lambda: (operand(m, k, dtype, majors[0]), operand(n, k, dtype, majors[1])),
        lambda: (torch.empty(m, n),), product, (tile, cluster, pair, splits), tolerance=2e-5,
    )  # fmt: skip


CASES = [
    _case("pair m256", (256, 64, 320), (256, 64, 64), (2, 1), 2),
    _case("pair m256 n128 along mn", (256, 128, 128), (256, 128, 64), (2, 1), 2, majors="MM"),
    _case("pair multicast b", (512, 64, 192), (256, 64, 64), (4, 1), 2),
    _case("pair multicast a", (256, 128, 192), (256, 64, 64), (2, 2), 2),
    _case("one cta multicast 2x2", (256, 128, 192), (128, 64, 64), (2, 2), 1),
    _case("pair e4m3", (256, 64, 256), (256, 64, 128), (2, 1), 2, torch.float8_e4m3fn),
    _case("split k", (128, 64, 384), (128, 64, 64), (1, 1), 1, splits=3),
    _case("pair split k", (256, 64, 256), (256, 64, 64), (2, 1), 2, splits=2),
]  # fmt: skip
