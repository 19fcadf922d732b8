"""After the main backward kernel: dQ scaled, rounded and without padding."""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute

from fa4core.backward.rowwise import PIECE, THREADS, Tile, aligned, loaded, passes, piece
from fa4core.backward.spec import RowSpec
from fa4core.forward.views import batched

PART_ROWS = 64  # see `RowSpec.part`


@cute.jit
def finish_rows(
    sums: cute.Tensor,
    table: cute.Tensor,
    grad_q: cute.Tensor,
    scale: cutlass.Float32,
    stream: cuda.CUstream,
    spec: cutlass.Constexpr,
):
    """One CTA for each query tile and head.

    Args:
        sums: Padded (heads, rows, d) float32: dQ without the scale, as `RowSpec.part` says.
        table: `Rows.table`.
        grad_q: (batch, rows, heads, columns), or packed.
        scale: Factor on q . k.
        stream: Of the launch.
        spec: A `RowSpec`.
    """
    finish_kernel(spec, aligned(sums), table, aligned(batched(grad_q, 4)), scale).launch(
        grid=[table.shape[0], sums.shape[0], 1], block=[THREADS, 1, 1], stream=stream
    )


@cute.kernel
def finish_kernel(
    spec: cutlass.Constexpr,
    sums: cute.Tensor,
    table: cute.Tensor,
    grad_q: cute.Tensor,
    scale: cutlass.Float32,
):
    tile, held = Tile(table), 2 if spec.part else 1  # rows of a thread
    of_row = spec.columns // PIECE
    for i in cutlass.range_constexpr(passes(spec.queries // held * of_row)):
        at = i * THREADS + tile.thread
        number, column = at // of_row, at % of_row
        row = number // 8 * 16 + number % 8 if spec.part else number
        if (number < spec.queries // held) & (row < tile.count):
            values = loaded(_sums(spec, sums, tile, row, column))
            for half in cutlass.range_constexpr(held):
                if row + 8 * half < tile.count:
                    result = cute.make_rmem_tensor(cute.make_layout(PIECE), grad_q.element_type)
                    for j in cutlass.range_constexpr(PIECE):
                        value = values[j // 2 * 2 * held + 2 * half + j % 2]
                        result[j] = (value * scale).to(grad_q.element_type)
                    to = piece(grad_q, (tile.b, tile.first + row + 8 * half, tile.h), column)
                    cute.autovec_copy(result, to)


def _sums(spec: RowSpec, sums: cute.Tensor, tile: Tile, row: Any, column: Any) -> cute.Tensor:
    """A piece of a row, or where sums lie in parts, of the row 8 below it, too: pairs of columns in
    turn."""
    first = tile.number * spec.queries
    if not spec.part:
        return piece(sums, (tile.h, first + row), column)
    part = row // PART_ROWS * (spec.d // spec.part) + column // (spec.part // PIECE)
    step, lanes = column % (spec.part // PIECE), row % PART_ROWS // 16 * 32 + row % 8 * 4
    at = part * PART_ROWS * spec.part + step * PART_ROWS * PIECE + lanes * 4
    flat = cute.make_tensor(sums[(tile.h, first, None)].iterator, spec.queries * spec.d)
    return cute.local_tile(flat, (2 * PIECE,), (at // (2 * PIECE),))
