"""Clusters: distributed shared memory, asynchronous remote stores, multicast loads."""

from __future__ import annotations

import math

import cutlass
import torch
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync
from cutlass.cutlass_dsl import T, dsl_user_op

from kernels.case import Case

THREADS = 128
TILE = (16, 32)


@dsl_user_op
def _load_remote(pointer: cute.Pointer, *, loc=None, ip=None) -> cutlass.Float32:
    """ld.shared::cluster: the DSL maps remote pointers but has no load for them."""
    address = pointer.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip)
    loaded = llvm.inline_asm(
        T.f32(), [address], "ld.shared::cluster.f32 $0, [$1];", "=f,r",
        has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc, ip=ip,
    )  # fmt: skip
    return cutlass.Float32(loaded)


@cute.kernel
def _exchange_kernel(source: cute.Tensor, target: cute.Tensor, size: cutlass.Constexpr):
    """Each CTA publishes its row and reads the next CTA's through distributed shared memory."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    smem = cutlass.memory.SmemAllocator()
    mine = smem.allocate_tensor(cutlass.Float32, cute.make_layout(THREADS), 128)
    mine[thread] = source[block, thread]
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    peer = (rank + 1) % size
    theirs = cute.arch.map_dsmem_ptr(mine.iterator + (THREADS - 1 - thread), peer)
    target[block, thread] = _load_remote(theirs)
    cute.arch.cluster_arrive()  # nobody leaves while others read its memory
    cute.arch.cluster_wait()


@cute.jit
def exchange(source: cute.Tensor, target: cute.Tensor, size: cutlass.Constexpr):
    _exchange_kernel(source, target, size).launch(
        grid=[source.shape[0], 1, 1], block=[THREADS, 1, 1], cluster=[size, 1, 1]
    )


@cute.kernel
def _remote_store_kernel(source: cute.Tensor, target: cute.Tensor, size: cutlass.Constexpr):
    """st.async into the next CTA, whose mbarrier counts the bytes."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    smem = cutlass.memory.SmemAllocator()
    arrived = smem.allocate_array(cutlass.Int64, 1)
    inbox = smem.allocate_tensor(cutlass.Int32, cute.make_layout(THREADS), 128)
    if thread == 0:
        cute.arch.mbarrier_init(arrived, 1)
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, THREADS * 4)
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    cute.arch.store_async_dsmem(
        inbox.iterator + thread, source[block, thread], arrived, (rank + 1) % size
    )
    cute.arch.mbarrier_wait(arrived, 0)
    target[block, thread] = inbox[THREADS - 1 - thread] + 1
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def remote_store(source: cute.Tensor, target: cute.Tensor, size: cutlass.Constexpr):
    _remote_store_kernel(source, target, size).launch(
        grid=[source.shape[0], 1, 1], block=[THREADS, 1, 1], cluster=[size, 1, 1]
    )


@cute.kernel
def _multicast_kernel(
    load: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor, layout: cute.ComposedLayout,
    size: cutlass.Constexpr,
):  # fmt: skip
    """Every CTA of the cluster loads a slice of one tile and multicasts it to all."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    smem = cutlass.memory.SmemAllocator()
    arrived = smem.allocate_array(cutlass.Int64, 1)
    tile = smem.allocate_tensor(cutlass.Float32, layout.outer, 1024, swizzle=layout.inner)
    tiles = cute.local_tile(source, TILE, (None, None))
    s_in, g_in = cpasync.tma_partition(
        load, rank, cute.make_layout(size),
        cute.group_modes(tile, 0, 2), cute.group_modes(tiles, 0, 2),
    )  # fmt: skip
    if thread == 0:
        cute.arch.mbarrier_init(arrived, 1)
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, math.prod(TILE) * 4)
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()  # barriers of all CTAs must be there before anyone's bytes arrive
    cute.arch.cluster_wait()
    if thread < 32:
        cute.copy(
            load, g_in[(None, block // size, 0)], s_in, tma_bar_ptr=arrived,
            mcast_mask=cutlass.Int16((1 << size) - 1),
        )  # fmt: skip
    cute.arch.mbarrier_wait(arrived, 0)
    out = target[(block, None, None)]
    for index in cutlass.range(thread, math.prod(TILE), THREADS):
        at = cute.idx2crd(index, TILE)
        out[at] = tile[at] + cutlass.Float32(rank)
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@cute.jit
def multicast(source: cute.Tensor, target: cute.Tensor, size: cutlass.Constexpr):
    layout = cute.make_composed_layout(
        cute.make_swizzle(3, 4, 3), 0, cute.make_layout(TILE, stride=(TILE[1], 1))
    )
    load, g_source = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SMulticastOp(), source, layout, TILE, num_multicast=size
    )
    _multicast_kernel(load, g_source, target, layout, size).launch(
        grid=[target.shape[0], 1, 1], block=[THREADS, 1, 1], cluster=[size, 1, 1]
    )


def _next_reversed(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.view(-1, size, THREADS).roll(-1, 1).flip(2).reshape(-1, THREADS)


def _multicast_expected(x: torch.Tensor, size: int) -> tuple[torch.Tensor]:
    tiles = x.view(-1, 1, *TILE) + torch.arange(size).view(1, size, 1, 1)
    return (tiles.reshape(-1, *TILE),)


def _exchange_case(size: int, target: str) -> Case:
    return Case(
        f"dsmem exchange of {size} {target}", exchange,
        lambda: (torch.randn(2 * size, THREADS),), lambda: (torch.empty(2 * size, THREADS),),
        lambda x: (_next_reversed(x, size),), (size,), target,
    )  # fmt: skip


def _store_case(size: int, target: str) -> Case:
    return Case(
        f"st.async of {size} {target}", remote_store,
        lambda: (torch.randint(-999, 999, (2 * size, THREADS), dtype=torch.int32),),
        lambda: (torch.empty(2 * size, THREADS, dtype=torch.int32),),
        lambda x: (x.view(-1, size, THREADS).roll(1, 1).flip(2).reshape(-1, THREADS) + 1,),
        (size,), target,
    )  # fmt: skip


def _multicast_case(size: int, target: str) -> Case:
    return Case(
        f"multicast to {size} {target}", multicast,
        lambda: (torch.randn(2 * TILE[0], TILE[1]),), lambda: (torch.empty(2 * size, *TILE),),
        lambda x: _multicast_expected(x, size), (size,), target,
    )  # fmt: skip


CASES = [
    _exchange_case(2, "sm100"), _exchange_case(4, "sm100"), _exchange_case(2, "sm90"),
    _store_case(2, "sm100"), _store_case(4, "sm90"),
    _multicast_case(2, "sm100"), _multicast_case(4, "sm100"), _multicast_case(2, "sm90"),
]  # fmt: skip
