"""Before the main backward kernel: row statistics as it takes them, and zeros to add dQ to.

Writes LSE in the log2 domain, +inf where a row has no weights (nothing to attend to, or scores too
large, see `reference.backward.far`), and delta, the row's sum of dO * O (FlashAttention-4, section
3.2) minus the gradient of the LSE.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import torch
from cutlass import cute

from fa4core.backward.rowwise import PIECE, THREADS, Tile, aligned, loaded, passes, piece
from fa4core.backward.spec import RowSpec
from fa4core.forward.views import batched
from fa4core.lowering.cute import select
from fa4core.reference.backward import far

LOG2E = math.log2(math.e)
FAR = far(torch.float32)
FLOATS = 4  # in 16 bytes


@cute.jit
def prepare_rows(
    out: cute.Tensor,
    grad_out: cute.Tensor,
    lse: cute.Tensor,
    grad_lse: cute.Tensor,
    table: cute.Tensor,
    to_lse: cute.Tensor,
    delta: cute.Tensor,
    grad_q: cute.Tensor,
    turns: cute.Tensor,
    stream: cuda.CUstream,
    spec: cutlass.Constexpr,
):
    """One CTA for each query tile and head.

    Args:
        out: (batch, rows, heads, columns), or packed, of the forward pass; likewise `grad_out`.
        lse: (batch, heads, rows) float32, or packed, natural units; likewise `grad_lse`, which is
            not read if there is none.
        table: `Rows.table`.
        to_lse: Padded (heads, rows) float32; likewise `delta`.
        grad_q: Padded (heads, rows, d) float32.
        turns: Padded (heads, tiles) int32.
        stream: Of the launch.
        spec: A `RowSpec`.
    """
    prepare_kernel(
        spec, aligned(batched(out, 4)), aligned(batched(grad_out, 4)), batched(lse, 3),
        batched(grad_lse, 3), table, to_lse, delta, aligned(grad_q), turns,
    ).launch(
        grid=[table.shape[0], to_lse.shape[0], 1], block=[THREADS, 1, 1], stream=stream
    )  # fmt: skip


@cute.kernel
def prepare_kernel(
    spec: cutlass.Constexpr,
    out: cute.Tensor,
    grad_out: cute.Tensor,
    lse: cute.Tensor,
    grad_lse: cute.Tensor,
    table: cute.Tensor,
    to_lse: cute.Tensor,
    delta: cute.Tensor,
    grad_q: cute.Tensor,
    turns: cute.Tensor,
):
    tile = Tile(table)
    lanes = _lanes(spec)
    for i in cutlass.range_constexpr(passes(spec.queries * lanes)):
        row = i * (THREADS // lanes) + tile.thread // lanes
        if row < spec.queries:  # for whole warps, whose lanes add up below
            part = cutlass.Float32(0.0)
            place = tile.b, tile.first + row, tile.h
            lane = tile.thread % lanes
            if (row < tile.count) & (lane < spec.columns // PIECE):
                part = _dot(piece(out, place, lane), piece(grad_out, place, lane))
            total = cute.arch.warp_reduction_sum(part, threads_in_group=lanes)
            to, base, shift = tile.number * spec.queries + row, cutlass.Float32(math.inf), total
            if row < tile.count:
                base = lse[tile.b, tile.h, tile.first + row] * LOG2E
                if cutlass.const_expr(spec.grad_lse):
                    shift = total - grad_lse[tile.b, tile.h, tile.first + row]
            nothing = cute.arch.fmax(base, -base) >= FAR  # -inf is; of NaN nothing is true
            if lane == 0:
                to_lse[tile.h, to] = select(nothing, math.inf, base, "float")
                delta[tile.h, to] = select(nothing, 0.0, shift, "float")
    _clear(spec, tile, grad_q)
    if tile.thread == 0:
        turns[tile.h, tile.number] = 0


def _lanes(spec: RowSpec) -> int:
    """Threads of a row: at least four, so that the rows of a warp, at most eight, are in a tile or
    none of them is."""
    return max(4, 1 << (spec.columns // PIECE - 1).bit_length())


def _dot(a: cute.Tensor, b: cute.Tensor) -> Any:
    a, b = loaded(a), loaded(b)
    total = cutlass.Float32(0.0)
    for i in range(PIECE):
        total = total + a[i].to(cutlass.Float32) * b[i].to(cutlass.Float32)
    return total


@cute.jit
def _clear(spec: cutlass.Constexpr, tile: Any, grad_q: cute.Tensor):
    zeros = cute.make_rmem_tensor(cute.make_layout(FLOATS), cutlass.Float32)
    zeros.fill(0.0)
    of_row = spec.d // FLOATS
    for i in cutlass.range_constexpr(passes(spec.queries * of_row)):
        at = i * THREADS + tile.thread
        if at < spec.queries * of_row:
            place = tile.h, tile.number * spec.queries + at // of_row
            cute.autovec_copy(zeros, piece(grad_q, place, at % of_row, FLOATS))
