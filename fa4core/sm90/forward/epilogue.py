"""The end of a work tile: O normalised, through shared memory to global; LSE and row maximum."""

from __future__ import annotations

import math
from typing import Any

from cutlass import cute

from fa4core.forward.rows import results_batch, row_at, write_row
from fa4core.forward.work import Row
from fa4core.lowering.cute import select
from fa4core.pipeline.device import meet
from fa4core.pipeline.effects import Fixed
from fa4core.sm90.forward.rows import NEVER, Rows, over_quad
from fa4core.sm90.forward.spec import ROWS, Spec
from fa4core.sm90.fragments import HALVES, half_of, maximum, place_in_row, row_of
from fa4core.sm90.memory import put, store, stored

LN2 = math.log(2.0)
LOG2E = math.log2(math.e)


class Epilogue(Fixed):
    """Finishes a warpgroup's rows.

    Attributes:
        copy: This warpgroup's number.
        thread: 0..127 within it.
        product: The tiled MMA whose accumulator O is.
        shared: (64, d_v, tiles) in shared memory, swizzled; None if keys are split.
        out: What TMA stores: of `views.keys`, or of `views.results` where heads are packed. If keys
            are split, the results of shares (rows, d, heads, batch), not by TMA.
        lse, row_max: (seqlen_q, heads, batch) in global memory.
        batches: Of queries.
        mods: For the sink.
        scale: Run-time factor on q . k.
    """

    def __init__(
        self, spec: Spec, copy, thread, product, shared, out, lse, row_max, batches, mods, scale
    ):
        self.spec, self.copy, self.thread, self.product = spec, copy, thread, product
        self.shared, self.out, self.batches = shared, out, batches
        self.lse, self.row_max, self.mods, self.scale = lse, row_max, mods, scale

    def wait(self) -> None:
        """Until the rows stored before have been read from shared memory."""
        stored(self.thread)
        meet(self.spec.pipeline, "consumer", self.copy)

    def finish(self, o: cute.Tensor, rows: Rows, item: Any, t: Any) -> None:
        """Into shared memory, rounded."""
        self._normalise(o, rows, item, t)
        put(o, self.product, self.thread, self.shared[(None, None, t)])

    def write(self, o: cute.Tensor, rows: Rows, item: Any, t: Any) -> None:
        """Into global memory; the four threads of a row write 32 bytes at a time."""
        self._normalise(o, rows, item, t)
        b = results_batch(self.spec, item, self.batches)
        for half in HALVES:
            _write_pairs(self, half_of(o, half), item, self._row(item, t, half), b)

    def store(self, item: Any, t: Any) -> None:
        meet(self.spec.pipeline, "consumer", self.copy)
        spec, out = self.spec, self.out
        row = (item.tile * spec.tiles + t) * spec.queries
        if spec.packed == 1:
            there, first = out.rows_of(item.b_q, item.h, item.start_q, item.seqlen_q, row)
            of, to = out.parts(there, (first, 0), (ROWS, spec.d_v))
        else:
            start = item.b_q * self.lse.shape[0] + item.start_q
            there = out.view[(None, None, None, item.h, start + item.seqlen_q)]
            first = out.view.shape[1] - item.seqlen_q + row
            of, to = out.parts(there, (0, first, 0), (*spec.q_rows, spec.d_v))
        store(out.atom, of[(None, 0, t)], to, self.thread, row < item.seqlen_q)

    def _row(self, item: Any, t: Any, half: int) -> Row:
        return row_at(self.spec, item, t, row_of(self.thread) + 8 * half)

    def _normalise(self, o: cute.Tensor, rows: Rows, item: Any, t: Any) -> None:
        """And write the rows' statistics."""
        b = results_batch(self.spec, item, self.batches)
        first = place_in_row(self.thread) == 0
        for half in HALVES:
            row = self._row(item, t, half)
            inverse, lse, highest = self._statistics(item, row, rows, half)
            values = half_of(o, half)
            for i in range(cute.size(values)):
                values[i] = values[i] * inverse
            write_row(self.lse, item, row, b, lse, first)
            write_row(self.row_max, item, row, b, highest, first)

    def _statistics(self, item: Any, row: Any, rows: Rows, half: int) -> tuple[Any, Any, Any]:
        """The factor that normalises the row, its LSE and its maximum, natural units."""
        natural = self.mods.factor_of(item, row, self.scale)
        applied = rows.applied[half] * natural
        highest = over_quad(rows.highest[half], maximum) * natural
        whole = over_quad(rows.total[half], lambda a, b: a + b)
        number = highest <= math.inf  # the weight of a NaN may be finite, see `polynomial_exp2`
        whole = select(number, whole, highest, "float")
        nothing = whole == 0.0  # not `applied == NEVER`, which holds if all scores are NaN, too
        part, base, empty = 1.0, applied, NEVER
        if self.mods.has_sink:
            empty = self.mods.sink_of(item, row)
            base = cute.arch.fmax(applied, empty)
            base = select(base == NEVER, 0.0, base, "float")
            part = cute.math.exp2((applied - base) * LOG2E, fastmath=True)
            whole = whole * part + cute.math.exp2((empty - base) * LOG2E, fastmath=True)
        whole = select(nothing, 1.0, whole, "float")
        lse = base + cute.math.log2(whole, fastmath=True) * LN2
        inverse = cute.arch.rcp_approx(whole)
        return part * inverse, select(nothing, empty, lse, "float"), highest


@cute.jit
def _write_pairs(work: Any, values: cute.Tensor, item: Any, row: Row, b: Any):
    if row.query < item.seqlen_q:
        to = work.out[item.start_q + row.query, None, row.head, b]
        for pair in range(work.spec.head_dim_v // 8):
            place = cute.local_tile(to, (2,), (4 * pair + place_in_row(work.thread),))
            cute.autovec_copy(values[None, pair], place)
