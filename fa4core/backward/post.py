"""After the main backward kernel: dQ scaled, rounded and without padding."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute

from fa4core.backward.rowwise import PIECE, THREADS, Tile, aligned, loaded, passes, piece
from fa4core.forward.views import batched


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
        sums: Padded (heads, rows, d) float32: dQ without the scale.
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
    tile = Tile(table)
    of_row = spec.columns // PIECE
    for i in cutlass.range_constexpr(passes(spec.queries * of_row)):
        at = i * THREADS + tile.thread
        row, column = at // of_row, at % of_row
        if row < tile.count:
            values = loaded(piece(sums, (tile.h, tile.number * spec.queries + row), column))
            result = cute.make_rmem_tensor(cute.make_layout(PIECE), grad_q.element_type)
            for j in cutlass.range_constexpr(PIECE):
                result[j] = (values[j] * scale).to(grad_q.element_type)
            to = piece(grad_q, (tile.b, tile.first + row, tile.h), column)
            cute.autovec_copy(result, to)
