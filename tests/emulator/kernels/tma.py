"""TMA tensor copies in every rank and swizzle with ragged bounds, bulk copies, reduce-add.

Each kernel reads what TMA loaded through ordinary shared loads of the same layout and writes the
result through ordinary stores before TMA stores it, so that a wrong swizzle, box, coordinate or
bound on either side gives a wrong value.
"""

from __future__ import annotations

import math

import cutlass
import torch
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from kernels.case import Case

THREADS = 128
SWIZZLE_BITS = {"none": 0, "32B": 1, "64B": 2, "128B": 3}


def _tile_layout(tile: tuple[int, ...], swizzle: str):
    """Row-major tile (last mode contiguous) under a TMA swizzle."""
    strides = [math.prod(tile[mode + 1 :]) for mode in range(len(tile))]
    outer = cute.make_layout(tile, stride=tuple(strides))
    return cute.make_composed_layout(cute.make_swizzle(SWIZZLE_BITS[swizzle], 4, 3), 0, outer)


@cute.kernel
def _increment_kernel(
    load: cute.CopyAtom,
    source: cute.Tensor,
    store: cute.CopyAtom,
    target: cute.Tensor,
    layout: cute.ComposedLayout,
    tile: cutlass.Constexpr,
    dtype: cutlass.Constexpr,
):
    """target = source + 1, one tile a CTA."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rank = cutlass.const_expr(len(tile))
    smem = cutlass.memory.SmemAllocator()
    arrived = smem.allocate_array(cutlass.Int64, 1)
    loaded = smem.allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)
    result = smem.allocate_tensor(dtype, layout.outer, 1024, swizzle=layout.inner)
    tiles = cute.local_tile(source, tile, (None,) * rank)
    outs = cute.local_tile(target, tile, (None,) * rank)
    s_in, g_in = cpasync.tma_partition(
        load, 0, cute.make_layout(1),
        cute.group_modes(loaded, 0, rank), cute.group_modes(tiles, 0, rank),
    )  # fmt: skip
    s_out, g_out = cpasync.tma_partition(
        store, 0, cute.make_layout(1),
        cute.group_modes(result, 0, rank), cute.group_modes(outs, 0, rank),
    )  # fmt: skip
    where = cute.idx2crd(block, g_in.shape[1:])
    if thread == 0:
        cute.arch.mbarrier_init(arrived, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if thread < 32:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, math.prod(tile) * dtype.width // 8)
        cute.copy(load, g_in[(None, *where)], s_in, tma_bar_ptr=arrived)
    cute.arch.mbarrier_wait(arrived, 0)
    for index in cutlass.range(thread, math.prod(tile), THREADS):
        at = cute.idx2crd(index, tile)
        result[at] = loaded[at] + dtype(1)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    if thread < 32:
        cute.copy(store, s_out, g_out[(None, *where)])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def increment(
    source: cute.Tensor, target: cute.Tensor, tile: cutlass.Constexpr, swizzle: cutlass.Constexpr
):
    layout = _tile_layout(tile, swizzle)
    load, g_source = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), source, layout, tile
    )
    store, g_target = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileS2GOp(), target, layout, tile
    )
    blocks = cute.size(cute.ceil_div(source.shape, tile))
    _increment_kernel(load, g_source, store, g_target, layout, tile, source.element_type).launch(
        grid=[blocks, 1, 1], block=[THREADS, 1, 1]
    )


@cute.kernel
def _padded_kernel(
    load: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, layout: cute.ComposedLayout,
    tile: cutlass.Constexpr,
):  # fmt: skip
    """Writes whole tiles, so that what TMA puts beyond the bounds is seen: zeros."""
    thread, _, _ = cute.arch.thread_idx()
    bx, by, _ = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    arrived = smem.allocate_array(cutlass.Int64, 1)
    loaded = smem.allocate_tensor(cutlass.Float32, layout.outer, 1024, swizzle=layout.inner)
    tiles = cute.local_tile(source, tile, (None, None))
    out = cute.local_tile(target, tile, (bx, by))
    s_in, g_in = cpasync.tma_partition(
        load, 0, cute.make_layout(1), cute.group_modes(loaded, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    if thread == 0:
        cute.arch.mbarrier_init(arrived, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if thread < 32:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, math.prod(tile) * 4)
        cute.copy(load, g_in[(None, bx, by)], s_in, tma_bar_ptr=arrived)
    cute.arch.mbarrier_wait(arrived, 0)
    for index in cutlass.range(thread, math.prod(tile), THREADS):
        at = cute.idx2crd(index, tile)
        out[at] = loaded[at]


@cute.jit
def padded(source: cute.Tensor, target: cute.Tensor, tile: cutlass.Constexpr):
    layout = _tile_layout(tile, "128B")
    load, g_source = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), source, layout, tile
    )
    grid = [target.shape[0] // tile[0], target.shape[1] // tile[1], 1]
    _padded_kernel(load, g_source, target, layout, tile).launch(grid=grid, block=[THREADS, 1, 1])


@cute.kernel
def _reduce_kernel(
    source: cute.Tensor, store: cute.CopyAtom, target: cute.Tensor, layout: cute.Layout,
    tile: cutlass.Constexpr,
):  # fmt: skip
    """All CTAs of one column of the grid add their slice into the same target tile."""
    thread, _, _ = cute.arch.thread_idx()
    part, bx, by = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    staged = smem.allocate_tensor(cutlass.Float32, layout, 1024)
    piece = cute.local_tile(source, (1, *tile), (part, bx, by))
    tiles = cute.local_tile(target, tile, (None, None))
    s_out, g_out = cpasync.tma_partition(
        store, 0, cute.make_layout(1), cute.group_modes(staged, 0, 2), cute.group_modes(tiles, 0, 2)
    )
    for index in cutlass.range(thread, math.prod(tile), THREADS):
        at = cute.idx2crd(index, tile)
        staged[at] = piece[(0, *at)]
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    if thread < 32:
        cute.copy(store, s_out, g_out[(None, bx, by)])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.kernel
def _clear_kernel(target: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    for index in cutlass.range(thread, cute.size(target), THREADS):
        target[index] = cutlass.Float32(0.0)


@cute.jit
def reduce_add(source: cute.Tensor, target: cute.Tensor, tile: cutlass.Constexpr):
    layout = cute.make_layout(tile, stride=(tile[1], 1))
    store, g_target = cpasync.make_tiled_tma_atom(
        cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind.ADD), target, layout, tile
    )
    _clear_kernel(target).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])
    grid = [source.shape[0], target.shape[0] // tile[0], target.shape[1] // tile[1]]
    _reduce_kernel(source, store, g_target, layout, tile).launch(grid=grid, block=[THREADS, 1, 1])


@cute.kernel
def _bulk_kernel(source: cute.Tensor, target: cute.Tensor, count: cutlass.Constexpr):
    """Plain bulk copies: no tensor map, contiguous bytes, in and out."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    arrived = smem.allocate_array(cutlass.Int64, 1)
    buffer = smem.allocate_tensor(cutlass.Float32, cute.make_layout(count), 128)
    if thread == 0:
        cute.arch.mbarrier_init(arrived, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    load = cute.make_copy_atom(
        cpasync.CopyBulkG2SOp(), cutlass.Float32, num_bits_per_copy=count * 32
    )
    store = cute.make_copy_atom(
        cpasync.CopyBulkS2GOp(), cutlass.Float32, num_bits_per_copy=count * 32
    )
    if thread == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, count * 4)
        cute.copy(load, cute.local_tile(source, (count,), (block,)), buffer, mbar_ptr=arrived)
    cute.arch.mbarrier_wait(arrived, 0)
    for index in cutlass.range(thread, count, THREADS):
        buffer[index] = buffer[index] * 2.0
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    if thread == 0:
        cute.copy(store, buffer, cute.local_tile(target, (count,), (block,)))
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0)


@cute.jit
def bulk(source: cute.Tensor, target: cute.Tensor, count: cutlass.Constexpr):
    _bulk_kernel(source, target, count).launch(
        grid=[cute.size(source) // count, 1, 1], block=[THREADS, 1, 1]
    )


def _increment_case(
    shape: tuple[int, ...], tile: tuple[int, ...], swizzle: str, dtype: torch.dtype,
    target: str = "sm100",
) -> Case:  # fmt: skip
    def make() -> torch.Tensor:
        return torch.randint(-50, 50, shape).to(dtype)

    return Case(
        f"tma rank {len(shape)} {swizzle} {str(dtype).removeprefix('torch.')} {target}",
        increment,
        lambda: (make(),),
        lambda: (torch.empty(shape, dtype=dtype),),
        lambda x: (x + 1,),
        constants=(tile, swizzle),
        target=target,
    )


def _padded_expected(x: torch.Tensor) -> tuple[torch.Tensor]:
    out = torch.zeros(64, 64)
    out[: x.shape[0], : x.shape[1]] = x
    return (out,)


CASES = [
    _increment_case((1000,), (256,), "none", torch.float32),
    _increment_case((50, 40), (16, 8), "32B", torch.float32),
    _increment_case((50, 40), (16, 16), "64B", torch.float32),
    _increment_case((50, 72), (16, 32), "128B", torch.float32),
    _increment_case((33, 48), (16, 16), "none", torch.float16),
    _increment_case((33, 48), (16, 16), "32B", torch.float16),
    _increment_case((33, 48), (16, 32), "64B", torch.bfloat16),
    _increment_case((33, 136), (16, 64), "128B", torch.bfloat16),
    _increment_case((20, 80), (8, 64), "64B", torch.int8),
    _increment_case((3, 13, 24), (2, 8, 8), "32B", torch.float32),
    _increment_case((3, 13, 40), (2, 8, 32), "128B", torch.float32),
    _increment_case((2, 3, 5, 24), (1, 2, 4, 16), "64B", torch.float32),
    _increment_case((2, 2, 3, 5, 24), (1, 2, 2, 4, 8), "32B", torch.float32),
    _increment_case((2, 2, 3, 5, 72), (1, 2, 2, 2, 32), "128B", torch.float32),
    Case(
        "tma zero fill", padded, lambda: (torch.randn(45, 52),), lambda: (torch.empty(64, 64),),
        _padded_expected, constants=((32, 32),),
    ),
    Case(
        "tma reduce add", reduce_add, lambda: (torch.randint(-8, 8, (5, 32, 64)).float(),),
        lambda: (torch.empty(32, 64),), lambda x: (x.sum(0),), constants=((16, 32),),
    ),
    Case(
        "bulk copies", bulk, lambda: (torch.randn(1024),), lambda: (torch.empty(1024),),
        lambda x: (2 * x,), constants=(256,),
    ),
    _increment_case((33, 136), (16, 64), "128B", torch.bfloat16, target="sm90"),
    _increment_case((2, 3, 5, 24), (1, 2, 4, 16), "64B", torch.float32, target="sm90"),
]  # fmt: skip
