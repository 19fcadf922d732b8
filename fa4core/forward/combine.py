"""Merges the results of the shares of split keys: a small kernel behind the forward's.

Each share leaves a normalised output, LSE and row maximum in float32. A row's outputs are weighted
with exp(LSE - joint LSE); shares in which a row attends to nothing (LSE -inf) are not even read.
A NaN share is read, though no maximum shows it.
The sink is in the first share's LSE. One thread merges eight columns of a row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute

from fa4core.forward.views import batched, by_rows
from fa4core.lowering.cute import select

THREADS = 128
COLUMNS = 8  # of a thread: 16 bytes of the output
LOG2E = math.log2(math.e)
NEVER = -math.inf
maximum = functools.partial(cute.arch.fmax, nan=True)  # NaN if either is


def followed_by_combine(forward: Callable[..., None]) -> Callable[..., None]:
    """A target's host function, for split keys."""

    @cute.jit
    def forward_and_combine(
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        row_max: cute.Tensor,
        part_out: cute.Tensor,
        part_lse: cute.Tensor,
        part_max: cute.Tensor,
        tables: tuple,
        pages: tuple,
        captured: tuple,
        scale: cutlass.Float32,
        ctas: cutlass.Int32,
        stream: cuda.CUstream,
        spec: cutlass.Constexpr,
    ):
        """As `forward`; `part_...` are the results of the shares, (shares * batch, ...)."""
        out, lse, row_max = batched(out, 4), batched(lse, 3), batched(row_max, 3)
        forward(
            q, k, v, part_out, part_lse, part_max, tables, pages, captured, scale, ctas, stream,
            spec,
        )  # fmt: skip
        pieces = cute.size(lse) * (spec.head_dim_v // COLUMNS)
        combine_kernel(
            spec.head_dim_v, by_rows(out), lse, row_max, by_rows(part_out), part_lse,
            part_max, pieces,
        ).launch(
            grid=[cute.ceil_div(pieces, THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream
        )  # fmt: skip

    return forward_and_combine


@cute.kernel
def combine_kernel(
    head_dim_v: cutlass.Constexpr,
    out: cute.Tensor,
    lse: cute.Tensor,
    row_max: cute.Tensor,
    part_out: cute.Tensor,
    part_lse: cute.Tensor,
    part_max: cute.Tensor,
    pieces: cutlass.Int32,
):
    """out: (rows, d, heads, batch); lse, row_max: (batch, heads, rows); a piece: 8 columns."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    piece = block * THREADS + thread
    if piece < pieces:
        of_row = head_dim_v // COLUMNS
        batches, heads, rows = lse.shape
        place, column = piece // of_row, piece % of_row
        h, place = place % heads, place // heads
        row, b = place % rows, place // rows
        shares = part_lse.shape[0] // batches

        base, highest = cutlass.Float32(NEVER), cutlass.Float32(NEVER)
        for share in range(shares):
            base = cute.arch.fmax(base, part_lse[share * batches + b, h, row])
            highest = maximum(highest, part_max[share * batches + b, h, row])
        total = cutlass.Float32(0.0)
        sums = cute.make_rmem_tensor(cute.make_layout(COLUMNS), cutlass.Float32)
        sums.fill(0.0)
        for share in range(shares):
            of_share = part_lse[share * batches + b, h, row]
            if of_share != NEVER:
                weight = cute.math.exp2((of_share - base) * LOG2E, fastmath=True)
                total = total + weight
                _add(sums, _piece(part_out, row, column, h, share * batches + b), weight)
        attended = total != 0.0
        factor = 1.0 / select(attended, total, 1.0, "float")
        result = cute.make_rmem_tensor(cute.make_layout(COLUMNS), out.element_type)
        for i in cutlass.range_constexpr(COLUMNS):
            result[i] = (sums[i] * factor).to(out.element_type)
        cute.autovec_copy(result, _piece(out, row, column, h, b))
        if column == 0:
            joint = base + cute.math.log2(total, fastmath=True) / LOG2E
            lse[b, h, row] = select(attended, joint, NEVER, "float")
            row_max[b, h, row] = highest


def _piece(rows: cute.Tensor, row: Any, column: Any, h: Any, b: Any) -> cute.Tensor:
    return cute.local_tile(rows[row, None, h, b], (COLUMNS,), (column,))


def _add(sums: cute.Tensor, values: cute.Tensor, weight: Any) -> None:
    loaded = cute.make_rmem_tensor(cute.make_layout(COLUMNS), cutlass.Float32)
    cute.autovec_copy(values, loaded)
    for i in range(COLUMNS):
        sums[i] = sums[i] + loaded[i] * weight
