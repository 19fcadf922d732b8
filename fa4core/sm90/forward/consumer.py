"""The consumer role: warpgroups of 64 queries that multiply, weigh and finish.

Accumulators live in registers. In the order in which a thread holds scores (`fragments`) they are,
rounded to 16 bits, the operand of the second product, so that P never leaves the registers.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import const_expr, cute
from cutlass.cute.nvgpu import warpgroup

from fa4core.forward.rows import row_at
from fa4core.forward.work import key_tile
from fa4core.pipeline.effects import Fixed, drains, reads, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.plan.kinds import FULL
from fa4core.sm90.forward.epilogue import LOG2E
from fa4core.sm90.forward.rows import Rows, exp2_block
from fa4core.sm90.forward.spec import Spec
from fa4core.sm90.fragments import (
    HALVES,
    column,
    copy_words,
    first_column,
    half_of,
    maximum,
    moved,
    row_of,
)


@cute.jit
def consumer(work: Any, plan: Any, ends: Ends, t: Any):
    """S of the first block; then S of each next block with O += P V of the one before it."""
    q, q_free = ends.waits("q_full"), ends.posts("q_empty")
    k, k_free = ends.waits("k_full"), ends.posts("k_empty")
    v, v_free = ends.waits("v_full"), ends.posts("v_empty")
    turn, give = ends.waits("turn", optional=True), ends.posts("turn", optional=True)
    in_q = ends.inside("rows", "q")  # then every tile has Q, and frees it behind the epilogue
    after = (t + 1) % len(work.tiles)
    if t == len(work.tiles) - 1:
        give.arrive(after)  # the first turn is the first consumer's
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        rows, loaded = work.start(t, item), work.load_row(t, item)
        work.clear(t)
        if (item.blocks > 0) | in_q:
            q.take(t)
        if item.blocks > 0:
            k_stage = k.take()
            turn.take(t)
            work.qk(t, k_stage)
            give.arrive(after)
            work.settle(0)
            k_free.arrive(stage=k_stage)
            begin = plan.run(item.first_run)
            bias = work.bias(t, item, begin.first, loaded)
            if plan.kind(begin, t) == FULL:
                work.modify(t, item, begin.first, False, loaded)
            else:
                work.modify(t, item, begin.first, True, loaded)
            work.add_bias(t, bias)
            rows.raise_maximum(work.peaks(t))
            rows.add(work.weigh(t, rows, True, None))
            work.pass_on(t)
            done = 1
            for r in range(item.first_run, item.end_run):
                run = plan.run(r)
                for j in range(run.first + done, run.end):
                    k_stage = k.take()
                    turn.take(t)
                    work.qk(t, k_stage)
                    v_stage = v.take()
                    work.pv(t, v_stage)
                    give.arrive(after)
                    work.settle(1)
                    k_free.arrive(stage=k_stage)
                    bias = work.bias(t, item, j, loaded)
                    if plan.kind(run, t) == FULL:
                        work.modify(t, item, j, False, loaded)
                    else:
                        work.modify(t, item, j, True, loaded)
                    # as if the maximum were still the one so far
                    sums = work.weigh(t, rows, False, bias)
                    factors, grown = work.no_factors(), rows.outgrown(sums, bias)
                    rows.see(work.peaks(t), bias)
                    if grown:
                        work.add_bias(t, bias)
                        factors = rows.raise_maximum(work.peaks(t))
                        sums = work.weigh(t, rows, True, None)
                    rows.add(sums)
                    work.settle(0)
                    v_free.arrive(stage=v_stage)
                    if grown:
                        work.rescale(t, factors)
                    work.pass_on(t)
                done = 0
            if const_expr(not in_q):
                q_free.arrive(t)
            v_stage = v.take()
            work.pv(t, v_stage)
            work.settle(0)
            v_free.arrive(stage=v_stage)
        index = source.next(index)
        if const_expr(work.staged):
            work.stored(0)
            work.finish(t, item, rows)
            work.store(t, item)
        else:
            work.write(t, item, rows)
        if const_expr(in_q):
            work.stored(0)
            q_free.arrive(t)
    work.stored(0)  # shared memory lives no longer than this


class ConsumerWork(Fixed):
    """What a consumer warpgroup does with its query tile.

    Attributes:
        make_qk, make_pv: Make a tiled MMA; a fresh one for each product, because setting a field of
            one inside a loop would change it outside.
        q, k, v: Operand fragments in shared memory; the last mode is the stage.
        s, p, o: Accumulator of scores, operand P and accumulator of the output, in registers.
        next: P of the next block, while the tensor core still reads P.
        thread: 0..127 within the warpgroup.
        mods: Mask and score mod.
        scale: Run-time factor on q . k.
        epilogue: Finishes rows.
        staged: Whether finished rows go through shared memory.
    """

    def __init__(self, spec: Spec, make_qk, make_pv, q, k, v, s, p, o, mods, scale, epilogue):
        self.spec, self.tiles = spec, tuple(range(spec.tiles))
        self.make_qk, self.make_pv, self.q, self.k, self.v = make_qk, make_pv, q, k, v
        self.s, self.p, self.o = s, p, o
        self.next = cute.make_rmem_tensor(p.layout, p.element_type)
        self.mods, self.scale, self.epilogue = mods, scale, epilogue
        mods.keep_factor()
        self.thread, self.staged = epilogue.thread, not spec.split

    def start(self, t: Any, item: Any) -> Rows:
        rows = self._rows(t, item)
        factors = [self.mods.factor_of(item, row, self.scale) * LOG2E for row in rows]
        return Rows(self.spec, (factors[0], factors[-1]))

    def load_row(self, t: Any, item: Any) -> tuple:
        """What the score mod needs, of each of the thread's rows."""
        loaded = [self.mods.load(item, row, self.scale) for row in self._rows(t, item)]
        return loaded[0], loaded[-1]

    def _rows(self, t: Any, item: Any) -> tuple:
        """The thread's rows, or one of them if mods can't tell the two apart but by the mask."""
        halves = HALVES if self.mods.by_query or self.spec.packed > 1 else HALVES[:1]
        return tuple(row_at(self.spec, item, t, row_of(self.thread) + 8 * half) for half in halves)

    @touches(lambda t: (writes("o", t),))
    def clear(self, t: Any) -> None:
        self.o.fill(0.0)

    @touches(lambda t, stage: (reads("q", t), reads("k", stage), writes("s", t)), unit="wgmma")
    def qk(self, t: Any, stage: Any) -> None:
        """S = Q K^T, begun."""
        product = self.make_qk()
        warpgroup.fence()
        for step in range(cute.size(self.q, mode=[2])):
            product.set(warpgroup.Field.ACCUMULATE, step > 0)
            q, k = self.q[(None, None, step, t)], self.k[(None, None, step, stage)]
            cute.gemm(product, self.s, q, k, self.s)
        warpgroup.commit_group()

    @touches(lambda t, stage: (reads("p", t), reads("v", stage), writes("o", t)), unit="wgmma")
    def pv(self, t: Any, stage: Any) -> None:
        """O += P V, begun."""
        product = self.make_pv()
        product.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.fence()
        for step in range(cute.size(self.p, mode=[2])):
            p, v = self.p[(None, None, step)], self.v[(None, None, step, stage)]
            cute.gemm(product, self.o, p, v, self.o)
        warpgroup.commit_group()

    @drains("wgmma")
    def settle(self, left: int) -> None:
        """Wait until at most `left` of the products begun are unfinished."""
        warpgroup.wait_group(left)

    @touches(lambda t, item, j, partial, loaded: (reads("s", t), writes("s", t)))
    def modify(self, t: Any, item: Any, j: Any, partial: bool, loaded: tuple) -> None:
        """Apply the score mod, and on partial tiles the mask, to S."""
        if self.mods.nothing_to_do(partial):
            return
        first = key_tile(j) * self.spec.block + first_column(self.thread)
        for half in HALVES:
            scores = half_of(self.s, half)
            row = row_at(self.spec, item, t, row_of(self.thread) + 8 * half)
            mods, of_row = self.mods, loaded[half]
            mods.apply(scores, item, row, first, partial, self.scale, column, of_row)

    def bias(self, t: Any, item: Any, j: Any, loaded: tuple) -> tuple | None:
        """What `modify` leaves to be added to each row, and its growth by the key; or None."""
        if not self.mods.late:
            return None
        first = key_tile(j) * self.spec.block + first_column(self.thread)
        rows = [row_at(self.spec, item, t, row_of(self.thread) + 8 * half) for half in HALVES]
        pairs = zip(rows, loaded, strict=True)
        return tuple(self.mods.bias(item, row, first, self.scale, of) for row, of in pairs)

    @touches(lambda t, bias: (reads("s", t), writes("s", t)))
    def add_bias(self, t: Any, bias: tuple | None) -> None:
        """Add what was left."""
        if bias is None:
            return
        for half in HALVES:
            scores = half_of(self.s, half)
            for i in range(cute.size(scores)):
                scores[i] = scores[i] + bias[half][0]

    def no_factors(self) -> tuple:
        return cutlass.Float32(1.0), cutlass.Float32(1.0)

    @touches(lambda t: (reads("s", t),))
    def peaks(self, t: Any) -> tuple:
        """Maximum of each of the thread's rows."""
        return tuple(_maximum(half_of(self.s, half)) for half in HALVES)

    @touches(lambda t, rows, exact, bias: (reads("s", t), writes("next", t)))
    def weigh(self, t: Any, rows: Rows, exact: bool, bias: tuple | None) -> tuple:
        """S -> the next P, rounded to the operand's type; gives the sums of the thread's rows.

        Kept as words: as halves, they would be put together behind the fence of the product.
        """
        weights = cute.make_rmem_tensor(self.s.layout, cutlass.Float32)
        sums = exp2_block(self.spec, self.s, weights, rows, exact, bias)
        rounded = cute.make_rmem_tensor(self.s.layout, self.p.element_type)
        rounded.store(weights.load().to(self.p.element_type))
        copy_words(rounded, self.next)
        return sums

    @touches(lambda t: (reads("next", t), writes("p", t)))
    def pass_on(self, t: Any) -> None:
        """The next P is P: the product that read the one before is done."""
        copy_words(self.next, self.p, moved)

    @touches(lambda t, factors: (reads("o", t), writes("o", t)))
    def rescale(self, t: Any, factors: tuple) -> None:
        """Multiply O."""
        for half in HALVES:
            row = half_of(self.o, half)
            for i in range(cute.size(row)):
                row[i] = row[i] * factors[half]

    @drains("store")
    def stored(self, left: int) -> None:
        """Wait until TMA has read the rows that were stored before."""
        self.epilogue.wait()

    @touches(lambda t, item, rows: (reads("o", t), writes("rows", t)))
    def finish(self, t: Any, item: Any, rows: Rows) -> None:
        """Normalise O and put it into shared memory; write the rows' statistics."""
        self.epilogue.finish(self.o, rows, item, t)

    @touches(lambda t, item, rows: (reads("o", t),))
    def write(self, t: Any, item: Any, rows: Rows) -> None:
        """Normalise O and write it and the rows' statistics, all of them from registers."""
        self.epilogue.write(self.o, rows, item, t)

    @touches(lambda t, item: (reads("rows", t),), unit="store")
    def store(self, t: Any, item: Any) -> None:
        """Rows from shared to global memory, begun."""
        self.epilogue.store(item, t)


def _maximum(values: cute.Tensor) -> Any:
    """Pairwise, for short chains."""
    left = [values[i] for i in range(cute.size(values))]
    while len(left) > 1:
        pairs = zip(left[::2], left[1::2], strict=False)
        left = [maximum(a, b) for a, b in pairs] + left[len(left) // 2 * 2 :]
    return left[0]
