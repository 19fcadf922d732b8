"""The compute role: two warpgroups, each with half of a block's queries; a thread has a key.

It makes P^T out of S^T, and dS^T = P (dP - delta) out of dP^T, 16 bit each, and writes them over
what they are made of; dS also to shared memory, where dQ = dS K takes it as it lies. Behind the
last block it brings dK and dV to global memory.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import cute

from fa4core.pipeline.effects import reads, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.sm100 import tmem
from fa4core.sm100.backward.finish import Finish
from fa4core.sm100.backward.spec import HALF, TILE, Spec
from fa4core.sm100.exp import exp2_pair

LOG2E = math.log2(math.e)
WIDTH = 32  # values that are read and written at a time


@cute.jit
def compute(work: Any, plan: Any, ends: Ends, half: Any):
    """Block by block: S -> P, dP -> dS; then dK and dV of the work tile."""
    s, p = ends.waits("s_full"), ends.posts("p_ready")
    dp, ds = ends.waits("dp_full"), ends.posts("ds_ready")
    rows, grads = ends.waits("rows_full"), ends.waits("grads_full")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        for r in range(item.first_run, item.end_run):
            run = plan.run(r)
            head = item.h + run.head
            for partial in (False, True):  # code of its own for each, so that FULL tiles have none
                for i in range(run.first, plan.end(run, 0, partial)):
                    stage = rows.take()
                    s.take()
                    scores = work.load_scores(half)
                    weights = work.weigh(half, scores, item, head, i, partial, stage)
                    work.store_p(half, weights)
                    p.arrive()
                    dp.take()
                    work.differentiate(half, weights, scores, item, head, i, partial, stage)
                    ds.arrive()
        if item.blocks > 0:
            grads.take()
        for result in work.results:
            if result.half == half:
                if item.blocks > 0:
                    work.stage(half, result)
                else:
                    work.stage_zeros(half, result)
                work.store(half, result, item)
                work.settle(0)
        index = source.next(index)


class ComputeWork(Finish):
    """What a compute thread does with its key.

    Attributes:
        rows: (128, {LSE, delta}, stage) in shared memory.
        mods: Mask and score mod.
    """

    def __init__(self, spec: Spec, thread, tmem, ds, stores, rows, mods, scale):
        super().__init__(spec, thread, tmem, ds, stores, scale)
        self.rows, self.mods = rows, mods

    @touches(lambda half: (reads("s", half),))
    def load_scores(self, half: Any) -> cute.Tensor:
        """The key's raw scores, in registers."""
        scores = cute.make_rmem_tensor(cute.make_layout(HALF), cutlass.Float32)
        for first in range(0, HALF, WIDTH):
            place = tmem.columns(self.tmem["s"](half) + first, WIDTH)
            to = cute.make_tensor(scores.iterator + first, cute.make_layout(WIDTH))
            tmem.load(place, to, self.thread)
        cute.arch.fence_view_async_tmem_load()
        return scores

    @touches(lambda half, scores, item, head, i, partial, stage: (reads("rows", stage),))
    def weigh(
        self,
        half: Any,
        scores: cute.Tensor,
        item: Any,
        head: Any,
        i: Any,
        partial: bool,
        stage: Any,
    ) -> cute.Tensor:
        """P of the key, float32; the scores stay raw if they are needed again."""
        weights = scores
        if self.spec.derivative:
            weights = cute.make_rmem_tensor(scores.layout, cutlass.Float32)
            weights.store(scores.load())
        factor = self.scale * LOG2E
        if not self.mods.plain:
            factor = cutlass.Float32(LOG2E)
        self.mods.apply(
            weights, item, head, self._key(item), self._query(half, i), partial, self.scale
        )
        for at in range(0, HALF, 4):
            lse = self._row_values(half, at, 0, stage)
            for n in (0, 2):
                pair, shift = (weights[at + n], weights[at + n + 1]), (-lse[n], -lse[n + 1])
                x = cute.arch.fma_packed_f32x2(pair, (factor, factor), shift)
                weights[at + n], weights[at + n + 1] = exp2_pair(self.spec, at + n, x)
        return weights

    @touches(lambda half, weights: (writes("p", half),))
    def store_p(self, half: Any, weights: cute.Tensor) -> None:
        """P, rounded, over S."""
        for first in range(0, HALF, WIDTH):
            words = _rounded(weights, first, WIDTH, self.dtype)
            place = tmem.columns(self.tmem["p"](half) + first // 2, WIDTH // 2)
            tmem.store(cute.recast_tensor(words, cutlass.Float32), place, self.thread)
        cute.arch.fence_view_async_tmem_store()

    @touches(
        lambda half, weights, scores, item, head, i, partial, stage: (
            reads("dp", half), reads("rows", stage), writes("ds_t", half), writes("ds", half)
        )
    )  # fmt: skip
    def differentiate(
        self, half: Any, weights: cute.Tensor, scores: cute.Tensor, item: Any, head: Any, i: Any,
        partial: bool, stage: Any,
    ) -> None:  # fmt: skip
        """dS out of dP and P; to tensor memory, over dP, and to shared memory."""
        for first in range(0, HALF, WIDTH):
            grads = cute.make_rmem_tensor(cute.make_layout(WIDTH), cutlass.Float32)
            place = tmem.columns(self.tmem["dp"](half) + first, WIDTH)
            tmem.load(place, grads, self.thread)
            cute.arch.fence_view_async_tmem_load()
            for at in range(0, WIDTH, 4):
                delta = self._row_values(half, first + at, 1, stage)
                for n in (at, at + 2):
                    less = delta[n - at], delta[n - at + 1]
                    pair = cute.arch.sub_packed_f32x2((grads[n], grads[n + 1]), less)
                    weight = weights[first + n], weights[first + n + 1]
                    grads[n], grads[n + 1] = cute.arch.mul_packed_f32x2(pair, weight)
            if self.spec.derivative:
                raw = cute.make_tensor(scores.iterator + first, cute.make_layout(WIDTH))
                query = self._query(half, i) + first
                self.mods.differentiate(
                    raw, grads, item, head, self._key(item), query, partial, self.scale
                )
            self._store_ds(half, first, _rounded(grads, 0, WIDTH, self.dtype))
        cute.arch.fence_view_async_tmem_store()
        cute.arch.fence_proxy("async.shared", space="cta")

    def _store_ds(self, half: Any, first: int, rounded: cute.Tensor) -> None:
        place = tmem.columns(self.tmem["ds_t"](half) + first // 2, WIDTH // 2)
        tmem.store(cute.recast_tensor(rounded, cutlass.Float32), place, self.thread)
        self.ds.write(rounded, half, first // 8)

    def _key(self, item: Any) -> Any:
        return item.tile * TILE + self.thread

    def _query(self, half: Any, i: Any) -> Any:
        return i * TILE + half * HALF

    def _row_values(self, half: Any, at: int, which: int, stage: Any) -> cute.Tensor:
        """LSE or delta of four queries: the same for all threads, a broadcast."""
        values = cute.make_rmem_tensor(cute.make_layout(4), cutlass.Float32)
        row = self.rows[None, which, stage]
        cute.autovec_copy(cute.local_tile(row, (4,), (half * (HALF // 4) + at // 4,)), values)
        return values


def _rounded(values: cute.Tensor, first: int, count: int, dtype: Any) -> cute.Tensor:
    chosen = cute.make_tensor(values.iterator + first, cute.make_layout(count))
    rounded = cute.make_rmem_tensor(cute.make_layout(count), dtype)
    rounded.store(chosen.load().to(dtype))
    return rounded
