"""Copies through multi-stage pipelines: hand-made mbarriers, the DSL's pipeline classes, cp.async.

More tiles than stages and few CTAs, so that every barrier goes through several phases.
"""

from __future__ import annotations

import cutlass
import torch
from cutlass import cute, pipeline
from cutlass.cute.nvgpu import cpasync

from kernels.case import Case

CONSUMERS = 128
TILE = (16, 32)
BYTES = TILE[0] * TILE[1] * 4


@cute.kernel
def _handmade_kernel(
    load: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, layout: cute.ComposedLayout,
    stages: cutlass.Constexpr,
):  # fmt: skip
    """One producer warp, four consumer warps, full and empty barriers with explicit phases."""
    thread, _, _ = cute.arch.thread_idx()
    column, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = cutlass.memory.SmemAllocator()
    full = smem.allocate_array(cutlass.Int64, stages)
    empty = smem.allocate_array(cutlass.Int64, stages)
    buffers = smem.allocate_tensor(cutlass.Float32, layout.outer, 1024, swizzle=layout.inner)
    tiles = cute.local_tile(source, TILE, (None, column))
    outs = cute.local_tile(target, TILE, (None, column))
    s_in, g_in = cpasync.tma_partition(
        load, 0, cute.make_layout(1), cute.group_modes(buffers, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    count = cute.size(tiles, mode=[2])
    if thread == 0:
        for stage in cutlass.range_constexpr(stages):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, CONSUMERS)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp == CONSUMERS // 32:
        stage = cutlass.Int32(0)
        phase = cutlass.Int32(1)  # a fresh barrier lets the producer through
        for tile in cutlass.range(count):
            cute.arch.mbarrier_wait(empty + stage, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, BYTES)
            cute.copy(load, g_in[(None, tile)], s_in[(None, stage)], tma_bar_ptr=full + stage)
            stage += 1
            if stage == stages:
                stage = cutlass.Int32(0)
                phase ^= 1
    else:
        stage = cutlass.Int32(0)
        phase = cutlass.Int32(0)
        for tile in cutlass.range(count):
            cute.arch.mbarrier_wait(full + stage, phase)
            for index in cutlass.range(thread, TILE[0] * TILE[1], CONSUMERS):
                at = cute.idx2crd(index, TILE)
                outs[(*at, tile)] = buffers[(*at, stage)] * 3.0
            cute.arch.mbarrier_arrive(empty + stage)
            stage += 1
            if stage == stages:
                stage = cutlass.Int32(0)
                phase ^= 1


def _stages(stages: int):
    swizzle = cute.make_swizzle(3, 4, 3)
    outer = cute.make_layout((*TILE, stages), stride=(TILE[1], 1, TILE[0] * TILE[1]))
    return cute.make_composed_layout(swizzle, 0, outer)


@cute.jit
def handmade(source: cute.Tensor, target: cute.Tensor, stages: cutlass.Constexpr):
    layout = _stages(stages)
    load, g_source = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), source, cute.select(layout, [0, 1]), TILE
    )
    _handmade_kernel(load, g_source, target, layout, stages).launch(
        grid=[source.shape[1] // TILE[1], 1, 1], block=[CONSUMERS + 32, 1, 1]
    )


@cute.kernel
def _classes_kernel(
    load: cute.CopyAtom, source: cute.Tensor, store: cute.CopyAtom, target: cute.Tensor,
    layout: cute.ComposedLayout, out_layout: cute.ComposedLayout, stages: cutlass.Constexpr,
):  # fmt: skip
    """TMA load pipeline and TMA store pipeline of `cutlass.pipeline`, two output buffers."""
    thread, _, _ = cute.arch.thread_idx()
    column, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = cutlass.memory.SmemAllocator()
    barriers = smem.allocate_array(cutlass.Int64, 2 * stages)
    buffers = smem.allocate_tensor(cutlass.Float32, layout.outer, 1024, swizzle=layout.inner)
    results = smem.allocate_tensor(
        cutlass.Float32, out_layout.outer, 1024, swizzle=out_layout.inner
    )
    producer, consumer = pipeline.PipelineTmaAsync.create(
        num_stages=stages,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, CONSUMERS // 32),
        tx_count=BYTES,
        barrier_storage=barriers,
    ).make_participants()
    stores = pipeline.PipelineTmaStore.create(
        num_stages=2, producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, CONSUMERS)
    )
    together = pipeline.NamedBarrier(barrier_id=1, num_threads=CONSUMERS)
    tiles = cute.local_tile(source, TILE, (None, column))
    outs = cute.local_tile(target, TILE, (None, column))
    s_in, g_in = cpasync.tma_partition(
        load, 0, cute.make_layout(1), cute.group_modes(buffers, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    s_out, g_out = cpasync.tma_partition(
        store, 0, cute.make_layout(1), cute.group_modes(results, 0, 2), cute.group_modes(outs, 0, 2)
    )
    count = cute.size(tiles, mode=[2])
    if warp == CONSUMERS // 32:
        for tile in cutlass.range(count):
            slot = producer.acquire_and_advance()
            cute.copy(load, g_in[(None, tile)], s_in[(None, slot.index)], tma_bar_ptr=slot.barrier)
        producer.tail()
    else:
        for tile in cutlass.range(count):
            slot = consumer.wait_and_advance()
            for index in cutlass.range(thread, TILE[0] * TILE[1], CONSUMERS):
                at = cute.idx2crd(index, TILE)
                results[(*at, tile % 2)] = buffers[(*at, slot.index)] - 1.0
            slot.release()
            cute.arch.fence_proxy("async.shared", space="cta")
            together.arrive_and_wait()
            if warp == 0:
                cute.copy(store, s_out[(None, tile % 2)], g_out[(None, tile)])
                stores.producer_commit()
                stores.producer_acquire()
            together.arrive_and_wait()
        if warp == 0:
            stores.producer_tail()


@cute.jit
def classes(source: cute.Tensor, target: cute.Tensor, stages: cutlass.Constexpr):
    layout, out_layout = _stages(stages), _stages(2)
    one = cute.select(layout, [0, 1])
    load, g_source = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), source, one, TILE
    )
    store, g_target = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(), target, one, TILE
    )
    _classes_kernel(load, g_source, store, g_target, layout, out_layout, stages).launch(
        grid=[source.shape[1] // TILE[1], 1, 1], block=[CONSUMERS + 32, 1, 1]
    )


@cute.kernel
def _cp_async_kernel(source: cute.Tensor, target: cute.Tensor, stages: cutlass.Constexpr):
    """Ampere's cp.async with commit groups: each thread copies 16 bytes, others read them."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    width = 4 * CONSUMERS
    buffers = smem.allocate_tensor(
        cutlass.Float32, cute.make_layout((width, stages), stride=(1, width)), 128
    )
    load = cute.make_copy_atom(cpasync.CopyG2SOp(), cutlass.Float32, num_bits_per_copy=128)
    row = source[(block, None)]
    out = target[(block, None)]
    count = cute.size(row) // width

    for tile in cutlass.range_constexpr(stages - 1):
        cute.copy(
            load, cute.local_tile(row, (4,), (tile * CONSUMERS + thread,)),
            cute.local_tile(buffers[(None, tile)], (4,), (thread,)),
        )  # fmt: skip
        cute.arch.cp_async_commit_group()
    for tile in cutlass.range(count):
        ahead = tile + stages - 1
        if ahead < count:
            cute.copy(
                load, cute.local_tile(row, (4,), (ahead * CONSUMERS + thread,)),
                cute.local_tile(buffers[(None, ahead % stages)], (4,), (thread,)),
            )  # fmt: skip
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(stages - 1)
        cute.arch.sync_threads()
        for part in cutlass.range_constexpr(4):
            at = part * CONSUMERS + thread
            out[tile * width + at] = buffers[(width - 1 - at, tile % stages)]  # another thread's
        cute.arch.sync_threads()


@cute.jit
def cp_async(source: cute.Tensor, target: cute.Tensor, stages: cutlass.Constexpr):
    _cp_async_kernel(source, target, stages).launch(
        grid=[source.shape[0], 1, 1], block=[CONSUMERS, 1, 1]
    )


def _reversed_blocks(x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x.view(x.shape[0], -1, 4 * CONSUMERS).flip(2).reshape(x.shape),)


def _matrix(rows: int = 112, columns: int = 64) -> tuple[torch.Tensor]:
    return (torch.randn(rows, columns),)


def _like() -> tuple[torch.Tensor]:
    return (torch.empty(112, 64),)


CASES = [
    Case("handmade pipeline", handmade, _matrix, _like, lambda x: (3 * x,), (3,)),
    Case("handmade pipeline sm90", handmade, _matrix, _like, lambda x: (3 * x,), (2,), "sm90"),
    Case("pipeline classes", classes, _matrix, _like, lambda x: (x - 1,), (2,)),
    Case("pipeline classes sm90", classes, _matrix, _like, lambda x: (x - 1,), (3,), "sm90"),
    Case(
        "cp.async", cp_async, lambda: (torch.randn(2, 5 * 512),),
        lambda: (torch.empty(2, 5 * 512),), _reversed_blocks, (3,),
    ),
    Case(
        "cp.async sm90", cp_async, lambda: (torch.randn(2, 5 * 512),),
        lambda: (torch.empty(2, 5 * 512),), _reversed_blocks, (2,), "sm90",
    ),
]  # fmt: skip
