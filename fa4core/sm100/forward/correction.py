"""The correction role: four warps that rescale O while it grows, and finish it.

Also the epilogue: it normalises O with the statistics that were really applied, joins the sink,
and writes O, LSE and row maximum. Work tiles without any key block end here, too.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

from fa4core.lowering.cute import select
from fa4core.pipeline.effects import Fixed, reads, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.sm100.forward.rows import row_of
from fa4core.sm100.forward.spec import TILE, Spec

LN2 = math.log(2.0)
LOG2E = math.log2(math.e)
NEVER = -math.inf
WIDTH = 16  # columns of O at a time


@cute.jit
def correction(work: Any, plan: Any, ends: Ends):
    """Says at once that O may be overwritten, rescales it for every later block, finishes it."""
    o, p = ends.waits("o_full"), ends.posts("p_ready")
    stats, stats_free = ends.waits("stats_full"), ends.posts("stats_empty")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        if item.blocks > 0:
            for t in work.tiles:
                p.arrive(t)  # behind the epilogue of the work tile before this one
            for t in work.tiles:
                stats.wait(t)
                work.factor(t)  # of nothing
                stats_free.arrive(t)
            stats.advance()
            for _ in range(item.blocks - 1):
                for t in work.tiles:
                    stats.wait(t)
                    factor = work.factor(t)
                    stats_free.arrive(t)
                    work.rescale(t, factor)
                    p.arrive(t)
                stats.advance()
            for t in work.tiles:
                stats.wait(t)
                rows = work.rows(t)
                stats_free.arrive(t)
                o.wait(t)
                work.finish(item, t, rows)
            stats.advance()
            o.advance()
        else:
            for t in work.tiles:
                work.finish_empty(item, t)
        index = source.next(index)


class CorrectionWork(Fixed):
    """What a correction thread does with its row.

    Attributes:
        thread: 0..127 within the warpgroup: the row of the tile.
        o: Address in tensor memory of the accumulator, by tile.
        stats: (3, 128, tiles) float32 in shared memory.
        out: (seqlen_q, d_v, heads, batch) in global memory; `lse`, `row_max` (seqlen_q, heads,
            batch).
    """

    def __init__(self, spec: Spec, thread, o, stats, mods, out, lse, row_max):
        self.spec, self.thread, self.o, self.stats, self.mods = spec, thread, o, stats, mods
        self.out, self.lse, self.row_max = out, lse, row_max
        self.tiles = tuple(range(spec.tiles))

    @touches(lambda t: (reads("stats", t),))
    def factor(self, t: int) -> cutlass.Float32:
        return self.stats[0, self.thread, t]

    @touches(lambda t: (reads("stats", t),))
    def rows(self, t: int) -> tuple[cutlass.Float32, cutlass.Float32, cutlass.Float32]:
        """Sum, applied maximum, true maximum."""
        return tuple(self.stats[i, self.thread, t] for i in range(3))

    @touches(lambda t, factor: (reads("o", t), writes("o", t)))
    def rescale(self, t: int, factor: cutlass.Float32) -> None:
        """Multiply O, unless no row of the warp needs it."""
        _rescale(self, t, factor)

    @touches(lambda item, t, rows: (reads("o", t),))
    def finish(self, item: Any, t: int, rows: tuple) -> None:
        """Normalise and write the row."""
        row = row_of(self.spec, item, t, self.thread)
        total, applied, highest = rows
        part, base = self._join(item, row, applied)
        whole = total * part
        if self.mods.has_sink:
            logit = self.mods.sink_of(item, row) * LOG2E
            whole = whole + cute.math.exp2(logit - base, fastmath=True)
        whole = select(applied == NEVER, 1.0, whole, "float")
        _write(self, item, t, row, part / whole)
        lse = (base + cute.math.log2(whole)) * LN2
        self._write_statistics(item, row, self._lse(item, row, applied, lse), highest * LN2)

    @touches(lambda item, t: ())
    def finish_empty(self, item: Any, t: int) -> None:
        """Write the row of a query tile with nothing to attend to."""
        row = row_of(self.spec, item, t, self.thread)
        _write_zeros(self, item, row)
        lse = cutlass.Float32(NEVER)
        self._write_statistics(item, row, self._lse(item, row, lse, lse), cutlass.Float32(NEVER))

    def _join(self, item: Any, row: Any, applied: Any) -> tuple[Any, Any]:
        """The factor of everything accumulated, and the maximum that the result is relative to."""
        if not self.mods.has_sink:
            return cutlass.Float32(1.0), applied
        logit = self.mods.sink_of(item, row) * LOG2E
        base = cute.arch.fmax(applied, logit)
        base = select(base == NEVER, 0.0, base, "float")
        return cute.math.exp2(applied - base, fastmath=True), base

    def _lse(self, item: Any, row: Any, applied: Any, lse: Any) -> Any:
        """LSE, right for rows with nothing to attend to, too."""
        empty = self.mods.sink_of(item, row) if self.mods.has_sink else NEVER
        return select(applied == NEVER, empty, lse, "float")

    def _write_statistics(self, item: Any, row: Any, lse: Any, highest: Any) -> None:
        _write_row(self.lse, item, row, lse)
        _write_row(self.row_max, item, row, highest)


@cute.jit
def _write_row(to: cute.Tensor, item: Any, row: Any, value: Any):
    if row.query < item.seqlen_q:
        to[item.start_q + row.query, row.head, item.b_q] = value


def _part(work: CorrectionWork, t: int, column: int, store: bool) -> tuple[Any, Any, Any]:
    """The thread's piece of `WIDTH` columns of O: copy atom, tensor memory, register layout."""
    place = cute.make_tensor(work.o(t) + column, cute.make_layout((TILE, WIDTH), stride=(65536, 1)))
    operation = tcgen05.St32x32bOp if store else tcgen05.Ld32x32bOp
    atom = cute.make_copy_atom(operation(tcgen05.Repetition(WIDTH)), cutlass.Float32)
    mine = tcgen05.make_tmem_copy(atom, place).get_slice(work.thread)
    tensor = mine.partition_D(place) if store else mine.partition_S(place)
    other = mine.partition_S if store else mine.partition_D
    shape = other(cute.make_identity_tensor((TILE, WIDTH))).layout.shape
    return atom, tensor, cute.make_layout(shape)


def _scale(values: cute.Tensor, factor: cutlass.Float32) -> None:
    for i in range(0, WIDTH, 2):
        pair = values[i], values[i + 1]
        values[i], values[i + 1] = cute.arch.mul_packed_f32x2(pair, (factor, factor))


@cute.jit
def _rescale(work: Any, t: int, factor: Any):
    if cute.arch.vote_any_sync(factor != 1.0):
        for column in range(0, work.spec.d_v, WIDTH):
            atom, source, layout = _part(work, t, column, False)
            values = cute.make_rmem_tensor(layout, cutlass.Float32)
            cute.copy(atom, source, values)
            cute.arch.fence_view_async_tmem_load()
            _scale(values, factor)
            atom, target, layout = _part(work, t, column, True)
            cute.copy(atom, values, target)
        cute.arch.fence_view_async_tmem_store()


@cute.jit
def _write(work: Any, item: Any, t: int, row: Any, factor: Any):
    """O's row times `factor` to global memory."""
    for column in cutlass.range_constexpr(0, work.spec.d_v, WIDTH):
        atom, source, layout = _part(work, t, column, False)
        values = cute.make_rmem_tensor(layout, cutlass.Float32)
        cute.copy(atom, source, values)
        cute.arch.fence_view_async_tmem_load()
        _scale(values, factor)
        _write_columns(work, item, row, column, values)


@cute.jit
def _write_zeros(work: Any, item: Any, row: Any):
    for column in cutlass.range_constexpr(0, work.spec.d_v, WIDTH):
        values = cute.make_rmem_tensor(cute.make_layout(WIDTH), cutlass.Float32)
        for i in cutlass.range_constexpr(WIDTH):
            values[i] = cutlass.Float32(0.0)
        _write_columns(work, item, row, column, values)


@cute.jit
def _write_columns(work: Any, item: Any, row: Any, column: cutlass.Constexpr, values: cute.Tensor):
    if row.query < item.seqlen_q:
        for i in cutlass.range_constexpr(0, WIDTH, 8):
            if cutlass.const_expr(column + i < work.spec.head_dim_v):
                eight = cute.make_rmem_tensor(cute.make_layout(8), work.out.element_type)
                for n in cutlass.range_constexpr(8):
                    eight[n] = values[i + n].to(work.out.element_type)
                place = work.out[item.start_q + row.query, None, row.head, item.b_q]
                target = cute.local_tile(place, (8,), ((column + i) // 8,))
                cute.autovec_copy(eight, target)
