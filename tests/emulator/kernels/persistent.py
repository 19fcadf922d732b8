"""Persistent kernels: a static stride over tiles, and dynamic scheduling by cluster launch control.

With cluster launch control (PTX: clusterlaunchcontrol.try_cancel) the whole grid is launched and
running CTAs cancel clusters that have not started, taking over their tiles.
"""

from __future__ import annotations

import cutlass
import torch
from cutlass import cute

from kernels.case import Case

WORKERS = 128
THREADS = WORKERS + 32


@cute.kernel
def _dynamic_kernel(source: cute.Tensor, target: cute.Tensor):
    """Warp 4 asks for the next tile while warps 0..3 work on this one."""
    thread, _, _ = cute.arch.thread_idx()
    tile, _, _ = cute.arch.block_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    smem = cutlass.memory.SmemAllocator()
    response = smem.allocate_tensor(cutlass.Int32, cute.make_layout(4), 16).iterator
    answered = smem.allocate_array(cutlass.Int64, 1)
    read = smem.allocate_array(cutlass.Int64, 1)
    if thread == 0:
        cute.arch.mbarrier_init(answered, 1)
        cute.arch.mbarrier_init(read, THREADS)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    phase = cutlass.Int32(0)
    valid = cutlass.Int32(1)
    while valid != 0:
        if warp == WORKERS // 32:
            cute.arch.mbarrier_wait(read, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(answered, 16)
                cute.arch.issue_clc_query(answered, response, multicast=False)
        else:
            target[tile, thread] = source[tile, thread] * 2.0
        cute.arch.mbarrier_wait(answered, phase)
        tile, _, _, valid = cute.arch.clc_response(response)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(read)
        phase ^= 1


@cute.jit
def dynamic(source: cute.Tensor, target: cute.Tensor):
    _dynamic_kernel(source, target).launch(
        grid=[source.shape[0], 1, 1], block=[THREADS, 1, 1], cluster=[1, 1, 1]
    )


@cute.kernel
def _static_kernel(source: cute.Tensor, target: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    first, _, _ = cute.arch.block_idx()
    stride, _, _ = cute.arch.grid_dim()
    smem = cutlass.memory.SmemAllocator()
    row = smem.allocate_tensor(cutlass.Float32, cute.make_layout(WORKERS), 16)
    for tile in cutlass.range(first, source.shape[0], stride):
        row[thread] = source[tile, thread]
        cute.arch.sync_threads()
        target[tile, thread] = row[WORKERS - 1 - thread]
        cute.arch.sync_threads()


@cute.jit
def static(source: cute.Tensor, target: cute.Tensor, ctas: cutlass.Constexpr):
    _static_kernel(source, target).launch(grid=[ctas, 1, 1], block=[WORKERS, 1, 1])


@cute.kernel
def _turns_kernel(source: cute.Tensor, total: cute.Tensor, turn: cute.Tensor):
    """CTAs take turns at one row through a counter in global memory, last CTA first."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    count, _, _ = cute.arch.grid_dim()
    mine = count - 1 - block
    if thread == 0:
        seen = cute.arch.load(turn.iterator.llvm_ptr, cutlass.Int32, sem="acquire", scope="gpu")
        while seen != mine:
            seen = cute.arch.load(turn.iterator.llvm_ptr, cutlass.Int32, sem="acquire", scope="gpu")
    cute.arch.sync_threads()
    total[thread] = total[thread] * 0.5 + source[block, thread]
    cute.arch.sync_threads()
    if thread == 0:
        cute.arch.atomic_add(turn.iterator, cutlass.Int32(1), sem="release", scope="gpu")


@cute.kernel
def _reset_kernel(total: cute.Tensor, turn: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    total[thread] = cutlass.Float32(0.0)
    if thread == 0:
        turn[0] = 0


@cute.jit
def turns(source: cute.Tensor, total: cute.Tensor, turn: cute.Tensor):
    _reset_kernel(total, turn).launch(grid=[1, 1, 1], block=[WORKERS, 1, 1])
    _turns_kernel(source, total, turn).launch(grid=[source.shape[0], 1, 1], block=[WORKERS, 1, 1])


def _turns_expected(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = torch.zeros(WORKERS)
    for row in x.flip(0):
        total = total * 0.5 + row
    return (total, torch.tensor([len(x)], dtype=torch.int32))


@cute.kernel
def _first_kernel(source: cute.Tensor, middle: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    middle[row, thread] = source[row, thread] + 1.0
    cute.arch.griddepcontrol_launch_dependents()


@cute.kernel
def _second_kernel(middle: cute.Tensor, target: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    cute.arch.griddepcontrol_wait()
    target[row, thread] = middle[row, thread] * 2.0


@cute.jit
def dependent(source: cute.Tensor, middle: cute.Tensor, target: cute.Tensor):
    """Programmatic dependent launch of the second kernel."""
    grid, block = [source.shape[0], 1, 1], [WORKERS, 1, 1]
    _first_kernel(source, middle).launch(grid=grid, block=block)
    _second_kernel(middle, target).launch(grid=grid, block=block, use_pdl=True)


def _rows() -> tuple[torch.Tensor]:
    return (torch.randn(13, WORKERS),)


CASES = [
    Case(
        "dynamic scheduler", dynamic, _rows, lambda: (torch.empty(13, WORKERS),),
        lambda x: (2 * x,), num_sms=4,
    ),
    Case(
        "static scheduler", static, _rows, lambda: (torch.empty(13, WORKERS),),
        lambda x: (x.flip(1),), (4,),
    ),
    Case(
        "turns through global memory", turns, lambda: (torch.randn(6, WORKERS),),
        lambda: (torch.empty(WORKERS), torch.empty(1, dtype=torch.int32)), _turns_expected,
        tolerance=1e-6,
    ),
    Case(
        "dependent launch", dependent, _rows,
        lambda: (torch.empty(13, WORKERS), torch.empty(13, WORKERS)),
        lambda x: (x + 1, (x + 1) * 2),
    ),
]  # fmt: skip
