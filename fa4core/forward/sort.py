"""The pre-pass of batch-sorted scheduling: sequences by the time of their longest work tile.

Two small kernels in front of the forward's (FlashAttention-4, section 3.3). The first finds the
longest work tile of every sequence, in key blocks. In the second each sequence counts those that
come before it, which gives its place, and moves its work tiles there. Sequences of one time stay in
order, so that the result is the same in every run. `metadata` calls it.
"""

from __future__ import annotations

from typing import Any

import attrs
import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute

from fa4core.forward.work import FIELDS, Item

WARP = 32
BLOCKS = [f.name for f in attrs.fields(Item)].index("blocks")


@cute.jit
def sort_batch(
    items: cute.Tensor,
    first: cute.Tensor,
    longest: cute.Tensor,
    batch_map: cute.Tensor,
    in_order: cute.Tensor,
    warps: cutlass.Int32,
    stream: cuda.CUstream,
    spec: cutlass.Constexpr,
):
    """Sort work tiles by sequence.

    Args:
        items: (n, fields) int32, the work tiles of sequence 0, of sequence 1, ...
        first: (batch + 1,) int32: where the work tiles of each sequence begin.
        longest: (batch,) int32, zeros: the workspace.
        batch_map: (batch,) int32, out: the sequence at each place.
        in_order: As `items`, out.
        warps: That share the work tiles of a sequence.
        stream: Of the launch.
        spec: Nothing depends on it.
    """
    batch = cute.size(longest)
    grid, block = [batch, warps, 1], [WARP, 1, 1]
    longest_kernel(items, first, longest).launch(grid=grid, block=block, stream=stream)
    place_kernel(items, first, longest, batch_map, in_order).launch(
        grid=grid, block=block, stream=stream
    )


@cute.kernel
def longest_kernel(items: cute.Tensor, first: cute.Tensor, longest: cute.Tensor):
    sequence, begin, end, step = _share(first)
    time = cutlass.Int32(0)
    for i in range(begin, end, step):
        time = cutlass.max(time, items[i, BLOCKS])
    time = cute.arch.warp_redux_sync(time, "max")
    with cute.arch.elect_one():
        cute.arch.atomic_max(longest.iterator + sequence, time, sem="relaxed", scope="gpu")


@cute.kernel
def place_kernel(
    items: cute.Tensor,
    first: cute.Tensor,
    longest: cute.Tensor,
    batch_map: cute.Tensor,
    in_order: cute.Tensor,
):
    sequence, begin, end, step = _share(first)
    lane, _, _ = cute.arch.thread_idx()
    time = longest[sequence]
    place, tiles = cutlass.Int32(0), cutlass.Int32(0)
    for other in range(lane, cute.size(longest), WARP):
        if longest[other] > time or (longest[other] == time and other < sequence):
            place += 1
            tiles += first[other + 1] - first[other]
    place = cute.arch.warp_redux_sync(place, "add")
    moved = cute.arch.warp_redux_sync(tiles, "add") - first[sequence]
    for i in range(begin, end, step):
        for field in cutlass.range_constexpr(FIELDS):
            in_order[i + moved, field] = items[i, field]
    batch_map[place] = sequence  # every thread writes the same


def _share(first: cute.Tensor) -> tuple[Any, Any, Any, Any]:
    """A thread's sequence, and which of its work tiles: from, to, step."""
    sequence, part, _ = cute.arch.block_idx()
    _, parts, _ = cute.arch.grid_dim()
    lane, _, _ = cute.arch.thread_idx()
    begin = first[sequence] + part * WARP + lane
    return sequence, begin, first[sequence + 1], parts * WARP
