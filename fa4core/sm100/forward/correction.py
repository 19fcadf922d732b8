"""The correction role: four warps that rescale O while it grows, and finish it.

Also the epilogue: it normalises O with the statistics that were really applied, joins the sink,
writes LSE, and stages O for the store role. Work tiles without any key block end here, too.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import cute

from fa4core.forward.rows import results_batch, row_at, write_row
from fa4core.lowering.cute import select
from fa4core.pipeline.effects import Fixed, reads, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.sm100.forward.memory import out_type
from fa4core.sm100.forward.spec import Spec
from fa4core.sm100.tmem import columns, load, store

LN2 = math.log(2.0)
LOG2E = math.log2(math.e)
NEVER = -math.inf
WIDTH = 16  # columns of O at a time


@cute.jit
def correction(work: Any, plan: Any, ends: Ends):
    """Rescales O before every block but the first; finishes it. After either P V may go on."""
    o, p = ends.waits("o_full"), ends.posts("p_ready")
    stats, stats_free = ends.waits("stats_full"), ends.posts("stats_empty")
    out, out_free = ends.posts("out_full"), ends.waits("out_empty")
    source = plan.source(ends)
    index = source.first()
    for t in work.tiles:
        p.arrive(t)  # nothing is in O yet
    while index < plan.count:
        item = plan.item(index)
        if item.blocks > 0:
            for t in work.tiles:  # nothing was accumulated before the first block
                stats.wait(t)
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
                factor = work.finish(item, t, rows)
                o.wait(t)
                for part in work.parts:
                    out_free.wait()
                    work.stage(t, part, out.stage, factor)
                    out.give()
                    out_free.advance()
                p.arrive(t)  # the next work tile may overwrite O
            stats.advance()
            o.advance()
        else:
            for t in work.tiles:
                work.finish_empty(item, t)
                for part in work.parts:
                    out_free.wait()
                    work.stage_zeros(part, out.stage)
                    out.give()
                    out_free.advance()
        index = source.next(index)


class CorrectionWork(Fixed):
    """What a correction thread does with its row.

    Attributes:
        thread: 0..127 within the warpgroup: the row of the tile.
        o: Address in tensor memory of the accumulator, by tile.
        stats: (2, 128, tiles) float32 in shared memory.
        staged: The row in shared memory: parts of O for the store role.
        dtype: Of it.
        lse, row_max: (seqlen_q, heads, batch) in global memory; of the shares if keys are split.
        batches: Of queries.
    """

    def __init__(self, spec: Spec, thread, o, stats, mods, staged, lse, row_max, batches):
        self.spec, self.thread, self.o, self.stats, self.mods = spec, thread, o, stats, mods
        self.staged, self.lse, self.row_max, self.batches = staged, lse, row_max, batches
        self.dtype = out_type(spec)
        self.tiles, self.parts = tuple(range(spec.tiles)), tuple(range(spec.out_parts))

    @touches(lambda t: (reads("stats", t),))
    def factor(self, t: int) -> cutlass.Float32:
        return self.stats[0, self.thread, t]

    @touches(lambda t: (reads("stats", t),))
    def rows(self, t: int) -> tuple[cutlass.Float32, cutlass.Float32]:
        """Sum, and the applied maximum in natural units."""
        return self.stats[0, self.thread, t], self.stats[1, self.thread, t]

    @touches(lambda t, factor: (reads("o", t), writes("o", t)))
    def rescale(self, t: int, factor: cutlass.Float32) -> None:
        """Multiply O, unless no row of the warp needs it."""
        _rescale(self, t, factor)

    def finish(self, item: Any, t: int, rows: tuple) -> cutlass.Float32:
        """Write the row's LSE; gives the factor that normalises O."""
        row = row_at(self.spec, item, t, self.thread)
        total, applied = rows
        part, base = self._join(item, row, applied)
        whole = total * part
        if self.mods.has_sink:
            logit = self.mods.sink_of(item, row)
            whole = whole + cute.math.exp2((logit - base) * LOG2E, fastmath=True)
        nothing = total == 0.0  # not `applied == NEVER`, which holds if all scores are NaN, too
        whole = select(nothing, 1.0, whole, "float")
        lse = base + cute.math.log2(whole) * LN2
        self._write(self.lse, item, row, select(nothing, self._empty(item, row), lse, "float"))
        return part * cute.arch.rcp_approx(whole)

    def finish_empty(self, item: Any, t: int) -> None:
        """Write the statistics of a row with nothing to attend to."""
        row, never = row_at(self.spec, item, t, self.thread), cutlass.Float32(NEVER)
        self._write(self.lse, item, row, self._empty(item, row))
        self._write(self.row_max, item, row, never)

    @touches(lambda t, part, stage, factor: (reads("o", t), writes("out", stage)))
    def stage(self, t: int, part: int, stage: Any, factor: cutlass.Float32) -> None:
        """Columns of O times `factor` to shared memory."""
        _stage(self, t, part, stage, factor)

    @touches(lambda part, stage: (writes("out", stage),))
    def stage_zeros(self, part: int, stage: Any) -> None:
        values = cute.make_rmem_tensor(cute.make_layout(WIDTH), cutlass.Float32)
        values.fill(0.0)
        for column in self.columns(part):
            self.write_columns(column, stage, values)
        cute.arch.fence_proxy("async.shared", space="cta")

    def columns(self, part: int) -> range:
        """First columns of the pieces of a part, within the part."""
        width = self.spec.out_columns
        return range(0, min(width, self.spec.d_v - part * width), WIDTH)

    def write_columns(self, column: int, stage: Any, values: cute.Tensor) -> None:
        rounded = cute.make_rmem_tensor(cute.make_layout(WIDTH), self.dtype)
        rounded.store(values.load().to(self.dtype))
        self.staged.write(rounded, stage, column * self.dtype.width // 128)

    def _write(self, to: cute.Tensor, item: Any, row: Any, value: Any) -> None:
        write_row(to, item, row, results_batch(self.spec, item, self.batches), value)

    def _join(self, item: Any, row: Any, applied: Any) -> tuple[Any, Any]:
        """The factor of everything accumulated, and the maximum that the result is relative to."""
        if not self.mods.has_sink:
            return cutlass.Float32(1.0), applied
        base = cute.arch.fmax(applied, self.mods.sink_of(item, row))
        base = select(base == NEVER, 0.0, base, "float")
        return cute.math.exp2((applied - base) * LOG2E, fastmath=True), base

    def _empty(self, item: Any, row: Any) -> cutlass.Float32:
        """The LSE of a row with nothing to attend to."""
        return self.mods.sink_of(item, row) if self.mods.has_sink else cutlass.Float32(NEVER)


def _load(work: CorrectionWork, t: int, column: int) -> cute.Tensor:
    """The thread's piece of `WIDTH` columns of O."""
    values = cute.make_rmem_tensor(cute.make_layout(WIDTH), cutlass.Float32)
    load(columns(work.o(t) + column, WIDTH), values, work.thread)
    cute.arch.fence_view_async_tmem_load()
    return values


def _scale(values: cute.Tensor, factor: cutlass.Float32) -> None:
    for i in range(0, WIDTH, 2):
        pair = values[i], values[i + 1]
        values[i], values[i + 1] = cute.arch.mul_packed_f32x2(pair, (factor, factor))


@cute.jit
def _rescale(work: Any, t: int, factor: Any):
    if cute.arch.vote_any_sync(factor != 1.0):
        for column in range(0, work.spec.d_v, WIDTH):
            values = _load(work, t, column)
            _scale(values, factor)
            store(values, columns(work.o(t) + column, WIDTH), work.thread)
        cute.arch.fence_view_async_tmem_store()


@cute.jit
def _stage(work: Any, t: int, part: cutlass.Constexpr, stage: Any, factor: Any):
    first = part * work.spec.out_columns
    for column in work.columns(part):
        values = _load(work, t, first + column)
        _scale(values, factor)
        work.write_columns(column, stage, values)
    cute.arch.fence_proxy("async.shared", space="cta")
