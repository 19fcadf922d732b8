"""The softmax role: four warps for each query tile, one thread for each row.

It takes scores out of tensor memory, masks and modifies them, keeps the row's maximum and sum, and
writes P back over them. Rescaling is lazy (FlashAttention-4, section 3.1): P, the sum and O are
relative to an applied maximum, which follows the true one only when that has grown by more than the
threshold (`online`); the correction role is told the factor.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import cute

from fa4core.forward.rows import results_batch, row_at, write_row
from fa4core.forward.work import key_tile
from fa4core.lowering.cute import select
from fa4core.pipeline.effects import Fixed, reads, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.sm100.forward.online import WIDTH, Block, Rows
from fa4core.sm100.forward.spec import PARTS, TILE, Spec
from fa4core.sm100.memory import DTYPES
from fa4core.sm100.tmem import columns, load, store

LOG2E = math.log2(math.e)
LONG = 16  # columns at a time of mods with long code


@cute.jit
def softmax(work: Any, plan: Any, ends: Ends, t: Any):
    """Block by block: S -> maximum, factor for the correction role, P; at the end the sum."""
    s = ends.waits("s_full")
    p, p_last = ends.posts("p_ready"), ends.posts("p_last")
    stats, stats_free = ends.posts("stats_full"), ends.waits("stats_empty")
    source = plan.source(ends)
    index = source.first()
    stats_free.wait(t)
    while index < plan.count:
        item = plan.item(index)
        rows, loaded = work.start(), work.load_captured(t, item)
        for r in range(item.first_run, item.end_run):
            run = plan.run(r)
            for partial in (False, True):  # code of its own for each, so that FULL tiles have none
                for j in range(run.first, plan.end(run, t, partial)):
                    s.wait(t)
                    scores = work.load_scores(t)
                    bias = work.modify(t, scores, item, loaded, j, partial)
                    block = rows.take(scores, bias, work.ahead(partial))
                    work.post_factor(t, block.factor)
                    stats.arrive(t)
                    for part in range_of_parts:
                        work.store_p(t, part, block)
                    p.arrive(t)
                    stats_free.advance()
                    # also keeps the compiler from computing the last part before that arrival
                    stats_free.wait(t)
                    work.store_p_last(t, block)
                    p_last.arrive(t)
                    rows.add(block)  # behind the arrivals: nobody waits for the sum
                    s.advance()
        if item.blocks > 0:
            work.post_rows(t, rows)
            stats.arrive(t)
            work.write_maximum(plan.item(index), t, rows)  # read anew, not kept in registers
            stats_free.advance()
            stats_free.wait(t)
        index = source.next(index)


range_of_parts = tuple(range(PARTS - 1))


class SoftmaxWork(Fixed):
    """What a softmax thread does with its row.

    Attributes:
        thread: 0..127 within the warpgroup: the row of the tile.
        scores, weights: Address in tensor memory of S and of P, by tile.
        stats: (2, 128, tiles) float32 in shared memory.
        mods: Mask and score mod.
        scale: Run-time factor on q . k.
        row_max: (seqlen_q, heads, batch) in global memory.
        batches: Of queries.
    """

    def __init__(
        self, spec: Spec, thread, scores, weights, stats, mods, scale, row_max, batches
    ):  # fmt: skip
        self.row_max, self.batches = row_max, batches
        self.spec, self.thread, self.mods, self.scale = spec, thread, mods, scale
        self.scores, self.weights, self.stats = scores, weights, stats
        self.dtype = DTYPES[spec.dtype]
        mods.keep_raw()

    @property
    def scales_late(self) -> bool:
        return self.mods.plain or self.mods.raw

    @property
    def factor(self) -> Any:
        """On the way to the log2 domain; mods take and give scores in natural units."""
        return self.scale * LOG2E if self.scales_late else cutlass.Float32(LOG2E)

    def natural(self, score: Any) -> Any:
        """A score in natural units."""
        return score * self.scale if self.scales_late else score

    def ahead(self, partial: bool) -> bool:
        """Whether there are registers to compute weights before their maximum is known."""
        return self.mods.nothing_to_do(partial)

    def start(self) -> Rows:
        return Rows(self.spec, self.factor)

    @touches(lambda t: (reads("s", t),))
    def load_scores(self, t: Any) -> cute.Tensor:
        """The row's 128 scores, in registers."""
        row = cute.make_rmem_tensor(cute.make_layout(TILE), cutlass.Float32)
        self._load_row(t, row)
        return row

    @touches(lambda t, *_: (reads("s", t), writes("s", t)))
    def modify(
        self, t: Any, scores: cute.Tensor, item: Any, loaded: Any, j: Any, partial: bool
    ) -> tuple[Any, Any] | None:
        """Apply the score mod, and on partial tiles the mask, to the loaded scores.

        Mods that are long go through tensor memory, a few columns at a time in a loop, so that
        their code is there once and not 128 times.
        """
        row = row_at(self.spec, item, t, self.thread)
        if self.mods.nothing_to_do(partial):
            return None
        if self.mods.raw and not partial:
            start, step = self.mods.bias(item, row, key_tile(j) * TILE, self.scale, loaded)
            _add_even(scores, step)
            return start, start + step
        if not self.mods.long(partial):
            first = key_tile(j) * TILE
            self.mods.apply(scores, item, row, first, partial, self.scale, loaded=loaded)
            return None
        _modify_in_place(self, t, item, row, loaded, key_tile(j) * TILE, partial)
        self._load_row(t, scores)
        return None

    def load_captured(self, t: Any, item: Any) -> Any:
        return self.mods.load(item, row_at(self.spec, item, t, self.thread))

    def _load_row(self, t: Any, row: cute.Tensor) -> None:
        for part in range(PARTS):
            place = columns(self.scores(t) + part * WIDTH, WIDTH)
            to = cute.make_tensor(row.iterator + part * WIDTH, cute.make_layout(WIDTH))
            load(place, to, self.thread)
        cute.arch.fence_view_async_tmem_load()

    @touches(lambda t, factor: (writes("stats", t),))
    def post_factor(self, t: Any, factor: Any) -> None:
        self.stats[0, self.thread, t] = factor

    @touches(lambda t, rows: (writes("stats", t),))
    def post_rows(self, t: Any, rows: Rows) -> None:
        number = rows.highest <= math.inf  # the weight of a NaN may be finite, `polynomial_exp2`
        self.stats[0, self.thread, t] = select(number, rows.total, rows.highest, "float")
        self.stats[1, self.thread, t] = self.natural(rows.applied)

    def write_maximum(self, item: Any, t: Any, rows: Rows) -> None:
        """The row's true maximum, natural units, to global memory."""
        row = row_at(self.spec, item, t, self.thread)
        batch = results_batch(self.spec, item, self.batches)
        write_row(self.row_max, item, row, batch, self.natural(rows.highest))

    @touches(lambda t, part, block: (writes("p", t),))
    def store_p(self, t: Any, part: int, block: Block) -> None:
        """Write a part of the weights; a fence after the last but one."""
        self._store(t, part, block, fence=part == PARTS - 2)

    @touches(lambda t, block: (writes("p_last", t),))
    def store_p_last(self, t: Any, block: Block) -> None:
        self._store(t, PARTS - 1, block, fence=True)

    def _store(self, t: Any, part: int, block: Block, fence: bool) -> None:
        first, width = part * WIDTH, WIDTH // 2
        if part > 0:  # `Rows.take` did the first
            block.weigh(part, block.exponent)
        weights = cute.make_tensor(block.weights.iterator + first, cute.make_layout(WIDTH))
        rounded = cute.make_rmem_tensor(cute.make_layout(WIDTH), self.dtype)
        rounded.store(weights.load().to(self.dtype))
        words = cute.recast_tensor(rounded, cutlass.Float32)
        store(words, columns(self.weights(t) + part * width, width), self.thread)
        if fence:
            cute.arch.fence_view_async_tmem_store()


def _add_even(scores: cute.Tensor, step: Any) -> None:
    """Add 0, 0, 2, 2, 4, 4, ... steps to scores: what is missing is `Block.bias`."""
    for i in range(0, cute.size(scores), 2):
        by, pair = cutlass.Float32(float(i)), (scores[i], scores[i + 1])
        pair = cute.arch.fma_packed_f32x2((by, by), (step, step), pair)
        scores[i], scores[i + 1] = pair


@cute.jit
def _modify_in_place(work: Any, t: Any, item: Any, row: Any, loaded: Any, first: Any, partial: Any):
    for part in cutlass.range(TILE // LONG, unroll=1):
        place = columns(work.scores(t) + part * LONG, LONG)
        values = cute.make_rmem_tensor(cute.make_layout(LONG), cutlass.Float32)
        load(place, values, work.thread)
        cute.arch.fence_view_async_tmem_load()
        at = first + part * LONG
        work.mods.apply(values, item, row, at, partial, work.scale, loaded=loaded)
        store(values, place, work.thread)
    cute.arch.fence_view_async_tmem_store()
