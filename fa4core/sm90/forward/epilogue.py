"""The end of a work tile: O normalised, through shared memory to global; LSE and row maximum."""

from __future__ import annotations

import math
from typing import Any

from cutlass import cute

from fa4core.forward.work import Row
from fa4core.lowering.cute import select
from fa4core.pipeline.device import meet
from fa4core.pipeline.effects import Fixed
from fa4core.sm90.forward.rows import NEVER, Rows, over_quad
from fa4core.sm90.forward.spec import ROWS, Spec
from fa4core.sm90.fragments import HALVES, half_of, maximum, row_of
from fa4core.sm90.memory import partition, put, store, stored

LN2 = math.log(2.0)
LOG2E = math.log2(math.e)


class Epilogue(Fixed):
    """Finishes a warpgroup's rows.

    Attributes:
        copy: This warpgroup's number.
        thread: 0..127 within it.
        product: The tiled MMA whose accumulator O is.
        shared: (64, d_v, tiles) in shared memory, swizzled.
        atom, out: TMA's store and its view of the output, as `kernel` makes them.
        lse, row_max: (seqlen_q, heads, batch) in global memory.
        mods: For the sink.
        scale: Run-time factor on q . k.
    """

    def __init__(
        self, spec: Spec, copy, thread, product, shared, atom, out, lse, row_max, mods, scale
    ):
        self.spec, self.copy, self.thread, self.product = spec, copy, thread, product
        self.shared, self.atom, self.out = shared, atom, out
        self.lse, self.row_max, self.mods, self.scale = lse, row_max, mods, scale

    def natural(self, score: Any) -> Any:
        """A score in natural units."""
        return score * self.scale if self.mods.plain else score

    def wait(self) -> None:
        """Until the rows stored before have been read from shared memory."""
        stored(self.thread)
        meet(self.spec.pipeline, "consumer", self.copy)

    def finish(self, o: cute.Tensor, rows: Rows, item: Any, t: Any) -> None:
        first = (item.tile * self.spec.tiles + t) * ROWS + row_of(self.thread)
        for half in HALVES:
            row = first + 8 * half
            inverse, lse, highest = self._statistics(item, row, rows, half)
            values = half_of(o, half)
            for i in range(cute.size(values)):
                values[i] = values[i] * inverse
            _write_row(self.lse, item, row, self.thread % 4, lse)
            _write_row(self.row_max, item, row, self.thread % 4, highest)
        put(o, self.product, self.thread, self.shared[(None, None, t)])

    def store(self, item: Any, t: Any) -> None:
        meet(self.spec.pipeline, "consumer", self.copy)
        row = (item.tile * self.spec.tiles + t) * ROWS
        of, to = partition(
            self.atom, self.shared, self.out, (ROWS, self.spec.d_v), 0,
            row, item.seqlen_q, item.start_q, item.h, item.b_q,
        )  # fmt: skip
        store(self.atom, of[(None, t)], to, self.thread, row < item.seqlen_q)

    def _statistics(self, item: Any, row: Any, rows: Rows, half: int) -> tuple[Any, Any, Any]:
        """The factor that normalises the row, its LSE and its maximum, natural units."""
        applied = self.natural(rows.applied[half])
        highest = self.natural(over_quad(rows.highest[half], maximum))
        whole = over_quad(rows.total[half], lambda a, b: a + b)
        number = highest <= math.inf  # the weight of a NaN may be finite, see `polynomial_exp2`
        whole = select(number, whole, highest, "float")
        nothing = whole == 0.0  # not `applied == NEVER`, which holds if all scores are NaN, too
        part, base, empty = 1.0, applied, NEVER
        if self.mods.has_sink:
            empty = self.mods.sink_of(item, Row(row, item.h))
            base = cute.arch.fmax(applied, empty)
            base = select(base == NEVER, 0.0, base, "float")
            part = cute.math.exp2((applied - base) * LOG2E, fastmath=True)
            whole = whole * part + cute.math.exp2((empty - base) * LOG2E, fastmath=True)
        whole = select(nothing, 1.0, whole, "float")
        lse = base + cute.math.log2(whole, fastmath=True) * LN2
        inverse = cute.arch.rcp_approx(whole)
        return part * inverse, select(nothing, empty, lse, "float"), highest


@cute.jit
def _write_row(to: cute.Tensor, item: Any, row: Any, column: Any, value: Any):
    if (row < item.seqlen_q) & (column == 0):
        to[item.start_q + row, item.h, item.b_q] = value
