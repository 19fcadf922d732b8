"""Reductions: shuffles, votes, shared memory between warps, atomics."""

from __future__ import annotations

import cutlass
import torch
from cutlass import cute

from kernels.case import Case

THREADS = 128
WARPS = THREADS // 32


@cute.kernel
def _row_kernel(x: cute.Tensor, total: cute.Tensor, largest: cute.Tensor):
    """One CTA a row: butterfly within warps, shared memory between them."""
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    smem = cutlass.memory.SmemAllocator()
    sums = smem.allocate_tensor(cutlass.Float32, cute.make_layout(WARPS), 16)
    peaks = smem.allocate_tensor(cutlass.Float32, cute.make_layout(WARPS), 16)
    s = cutlass.Float32(0.0)
    m = -cutlass.Float32.inf
    for column in cutlass.range(thread, cute.size(x, mode=[1]), THREADS):
        s += x[row, column]
        m = cute.arch.fmax(m, x[row, column])
    for step in cutlass.range_constexpr(5):
        s += cute.arch.shuffle_sync_bfly(s, offset=1 << step)
        m = cute.arch.fmax(m, cute.arch.shuffle_sync_bfly(m, offset=1 << step))
    if thread % 32 == 0:
        sums[thread // 32] = s
        peaks[thread // 32] = m
    cute.arch.sync_threads()
    if thread == 0:
        for warp in cutlass.range_constexpr(1, WARPS):
            s += sums[warp]
            m = cute.arch.fmax(m, peaks[warp])
        total[row] = s
        largest[row] = m


@cute.jit
def rows(x: cute.Tensor, total: cute.Tensor, largest: cute.Tensor):
    _row_kernel(x, total, largest).launch(
        grid=[cute.size(x, mode=[0]), 1, 1], block=[THREADS, 1, 1]
    )


@cute.kernel
def _atomic_kernel(x: cute.Tensor, total: cute.Tensor):
    """All CTAs add into one counter per residue class."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    value = x[block * THREADS + thread]
    cute.arch.atomic_add(total.iterator + (value & 7), cutlass.Int32(1), scope="gpu")


@cute.kernel
def _zero_kernel(total: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    if thread < 8:
        total[thread] = 0


@cute.jit
def histogram(x: cute.Tensor, total: cute.Tensor):
    _zero_kernel(total).launch(grid=[1, 1, 1], block=[32, 1, 1])
    _atomic_kernel(x, total).launch(grid=[cute.size(x) // THREADS, 1, 1], block=[THREADS, 1, 1])


@cute.kernel
def _vote_kernel(x: cute.Tensor, ballots: cute.Tensor, flags: cute.Tensor, ranks: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % 32
    warp = thread // 32
    odd = (x[thread] & 1) == 1
    ballot = cute.arch.vote_ballot_sync(odd)
    some = cute.arch.vote_any_sync(odd)
    every = cute.arch.vote_all_sync(odd)
    ranks[thread] = cute.arch.popc(ballot & ((1 << lane) - 1))
    if lane == 0:
        ballots[warp] = ballot
        flags[warp] = cutlass.Int32(some) * 2 + cutlass.Int32(every)


@cute.jit
def votes(x: cute.Tensor, ballots: cute.Tensor, flags: cute.Tensor, ranks: cute.Tensor):
    _vote_kernel(x, ballots, flags, ranks).launch(grid=[1, 1, 1], block=[THREADS, 1, 1])


def _votes_expected(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    odd = (x & 1).view(WARPS, 32).long()
    ballots = (odd << torch.arange(32)).sum(1)
    flags = odd.any(1).int() * 2 + odd.bool().all(1).int()
    return (
        torch.where(ballots >= 2**31, ballots - 2**32, ballots).to(torch.int32),
        flags.to(torch.int32),
        (odd.cumsum(1) - odd).flatten().to(torch.int32),
    )


def _odd_or_even() -> torch.Tensor:
    x = torch.randint(0, 1000, (THREADS,), dtype=torch.int32)
    x[:32] |= 1  # one warp with every flag set
    x[32:64] &= ~1  # and one with none
    return x


CASES = [
    Case(
        "row sum and max", rows,
        lambda: (torch.randn(6, 300),), lambda: (torch.empty(6), torch.empty(6)),
        lambda x: (x.double().sum(1), x.double().max(1).values), tolerance=1e-6,
    ),
    Case(
        "histogram by atomics", histogram,
        lambda: (torch.randint(0, 2**20, (4 * THREADS,), dtype=torch.int32),),
        lambda: (torch.empty(8, dtype=torch.int32),),
        lambda x: (torch.bincount(x & 7, minlength=8).to(torch.int32),),
    ),
    Case(
        "votes", votes, lambda: (_odd_or_even(),),
        lambda: (torch.empty(WARPS, dtype=torch.int32), torch.empty(WARPS, dtype=torch.int32),
                 torch.empty(THREADS, dtype=torch.int32)),
        _votes_expected,
    ),
]  # fmt: skip
