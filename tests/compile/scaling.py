"""A kernel with a forward kernel's arguments and next to no work: out = scale * v + table[0, 0].

It stands for the real kernels where the way to a GPU is tested, on GPUs that can't run those.
lse is the first captured tensor by head, row_max the scale.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute


@cute.kernel
def scaling_kernel(
    v: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    row_max: cute.Tensor,
    table: cute.Tensor,
    by_head: cute.Tensor,
    scale: cutlass.Float32,
):
    d, _, _ = cute.arch.thread_idx()
    row, head, b = cute.arch.block_idx()
    value = cutlass.Float32(v[b, row, head, d]) * scale + cutlass.Float32(table[0, 0])
    out[b, row, head, d] = out.element_type(value)
    if d == 0:
        lse[b, head, row] = by_head[head]
        row_max[b, head, row] = scale


@cute.jit
def scaling(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    row_max: cute.Tensor,
    table: cute.Tensor,
    captured: tuple,
    scale: cutlass.Float32,
    ctas: cutlass.Int32,
    stream: cuda.CUstream,
    spec: cutlass.Constexpr[Any],
):
    batch, rows, heads, d = (out.shape[i] for i in range(4))
    scaling_kernel(v, out, lse, row_max, table, captured[0], scale).launch(
        grid=[rows, heads, batch], block=[d, 1, 1], stream=stream
    )
