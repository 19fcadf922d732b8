"""The compute role: two warpgroups, each with half of a block's queries; a thread has a key.

It makes P^T out of S^T, and dS^T = P (dP - delta) out of dP^T, 16 bit each, and writes them over
what they are made of; dS also to shared memory, where dQ = dS K takes it as it lies: in a pair, one
half of it in the peer's. Behind the last block it brings dK and dV to global memory.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import const_expr, cute

from fa4core.pipeline.effects import reads, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.sm100 import tmem
from fa4core.sm100.backward.finish import Finish
from fa4core.sm100.backward.spec import Spec, ds_stage
from fa4core.sm100.backward.tiles import TILE
from fa4core.sm100.exp import exp2_pair

LOG2E = math.log2(math.e)


@cute.jit
def compute(work: Any, plan: Any, ends: Ends, half: Any):
    """Block by block: S -> P, dP -> dS; then dK and dV of the work tile."""
    s, p = ends.waits("s_full"), ends.posts("p_ready")
    s_read = ends.posts("s_read", optional=True)
    dp, ds = ends.waits("dp_full", optional=True), ends.posts("ds_ready", optional=True)
    rows, grads = ends.waits("rows_full"), ends.waits("grads_full")
    copied = ends.posts("ds_copied", optional=True)
    ds_free = ends.waits("ds_empty", optional=True)
    read, all_read = (end("staged_read", optional=True) for end in (ends.posts, ends.waits))
    place = ds_stage(work.pair, work.cta, half)
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
                    s_read.arrive()
                    weights = work.weigh(half, scores, item, head, i, partial, stage)
                    p.arrive()
                    if const_expr(work.with_k):
                        dp.take()
                        ds_free.take()
                        work.differentiate(
                            half, weights, scores, item, head, i, partial, stage, place
                        )
                        ds.arrive()
                    if const_expr(work.pair):  # noqa: SIM102 (when compiling)
                        if half != work.cta:  # of the queries for which the peer forms dQ
                            barrier = copied.expect(work.copied_bytes, half)
                            work.send(half, work.cta, barrier=barrier)
        if item.blocks > 0:
            grads.take()
        item = plan.item(index)  # read anew, not kept in registers
        for result in work.results:
            if result.half == half:
                if item.blocks > 0:
                    work.stage(place, result, item)
                else:
                    work.stage_zeros(place, result, item)
                work.store(place, result, item)
                work.settle(0)
        read.arrive()
        all_read.take()
        index = source.next(index)
    ds_free.drain()


class ComputeWork(Finish):
    """What a compute thread does with its key.

    Attributes:
        ds: The row of dS in shared memory, in the warpgroup's half.
        rows: (queries, {LSE, delta}, stage) in shared memory.
        mods: Mask and score mod.
        copy: Of the warp's rows of dS to the peer.
        cta: Rank of the CTA in its pair.
    """

    def __init__(
        self, spec: Spec, thread, tmem, ds, staged, stores, rows, mods, scale, copy, cta
    ):  # fmt: skip
        super().__init__(spec, thread, tmem, staged, stores, scale)
        self.ds, self.rows, self.mods, self.copy, self.cta = ds, rows, mods, copy, cta
        self.pair, self.with_k = spec.pair, spec.with_k
        self.copied_bytes = copy.nbytes if spec.pair else 0
        self.width = 16 if spec.derivative else 32
        self.firsts = range(0, spec.half, self.width)

    @touches(lambda half: (reads("s", half),))
    def load_scores(self, half: Any) -> cute.Tensor:
        """The key's raw scores, in registers."""
        scores = cute.make_rmem_tensor(cute.make_layout(self.spec.half), cutlass.Float32)
        for first in self.firsts:
            place = tmem.columns(self.tmem["s"](half) + first, self.width)
            tmem.load(place, self._part(scores, first), self.thread)
        cute.arch.fence_view_async_tmem_load()
        return scores

    @touches(
        lambda half, scores, item, head, i, partial, stage: (
            reads("rows", stage), writes("p", half)
        )
    )  # fmt: skip
    def weigh(
        self, half: Any, scores: cute.Tensor, item: Any, head: Any, i: Any, partial: bool,
        stage: Any,
    ) -> cute.Tensor:  # fmt: skip
        """P of the key; rounded, over S. Gives what is kept of it until dP is there: the rounded
        numbers if raw scores are kept, too."""
        rounded = cute.make_rmem_tensor(scores.layout, self.dtype)
        key, query = self._indices(item, half, i)
        for first in self.firsts:
            weights = self._part(scores, first)
            if self.spec.derivative:
                weights = cute.make_rmem_tensor(weights.layout, cutlass.Float32)
                weights.store(self._part(scores, first).load())
            self.mods.apply(weights, item, head, key, query + first, partial, self.scale)
            self._exponentiate(half, first, weights, stage)
            part = self._part(rounded, first)
            part.store(weights.load().to(self.dtype))
            if self.spec.with_v:
                place = tmem.columns(self.tmem["p"](half) + first // 2, self.width // 2)
                tmem.store(cute.recast_tensor(part, cutlass.Float32), place, self.thread)
        cute.arch.fence_view_async_tmem_store()
        return rounded if self.spec.derivative else scores

    def _exponentiate(self, half: Any, first: int, values: cute.Tensor, stage: Any) -> None:
        """Scores of a part -> their weights, in place."""
        factor = self.scale * LOG2E if self.mods.plain else cutlass.Float32(LOG2E)
        for at in range(0, self.width, 4):
            lse = self._row_values(half, first + at, 0, stage)
            for n in (0, 2):
                pair, shift = (values[at + n], values[at + n + 1]), (-lse[n], -lse[n + 1])
                x = cute.arch.fma_packed_f32x2(pair, (factor, factor), shift)
                values[at + n], values[at + n + 1] = exp2_pair(self.spec, first + at + n, x)

    @touches(
        lambda half, weights, scores, item, head, i, partial, stage, place: (
            reads("dp", half), reads("rows", stage), writes("ds_t", half), writes("ds", place)
        )
    )  # fmt: skip
    def differentiate(
        self, half: Any, weights: cute.Tensor, scores: cute.Tensor, item: Any, head: Any, i: Any,
        partial: bool, stage: Any, place: Any,
    ) -> None:  # fmt: skip
        """dS out of dP and P; to tensor memory, over dP, and to shared memory."""
        key, query = self._indices(item, half, i)
        for first in self.firsts:
            grads = cute.make_rmem_tensor(cute.make_layout(self.width), cutlass.Float32)
            place = tmem.columns(self.tmem["dp"](half) + first, self.width)
            tmem.load(place, grads, self.thread)
            cute.arch.fence_view_async_tmem_load()
            self._times_weights(half, first, grads, self._part(weights, first), stage)
            if self.spec.derivative:
                self.mods.differentiate(
                    self._part(scores, first), grads, item, head, key, query + first,
                    partial, self.scale,
                )  # fmt: skip
            self._store_ds(half, first, grads, query >> 31)
        cute.arch.fence_view_async_tmem_store()
        cute.arch.fence_proxy("async.shared", space="cta")

    @touches(
        lambda half, cta, barrier: (
            reads("ds", ds_stage(True, cta, half)), writes("ds", cta, peer=True)
        ),
        unit="tma",
    )  # fmt: skip
    def send(self, half: Any, cta: Any, barrier: Any) -> None:
        """The warp's rows of dS to the peer, begun; `differentiate` has shown them to TMA."""
        with cute.arch.elect_one():
            self.copy.start(barrier)

    def _times_weights(
        self, half: Any, first: int, grads: cute.Tensor, weights: cute.Tensor, stage: Any
    ) -> None:
        """dP of a part -> P (dP - delta), in place."""
        for at in range(0, self.width, 4):
            delta = self._row_values(half, first + at, 1, stage)
            for n in (0, 2):
                less, pair = (delta[n], delta[n + 1]), (grads[at + n], grads[at + n + 1])
                pair = cute.arch.sub_packed_f32x2(pair, less)
                weight = _two(weights, at + n)
                grads[at + n], grads[at + n + 1] = cute.arch.mul_packed_f32x2(pair, weight)

    def _store_ds(self, half: Any, first: int, grads: cute.Tensor, zero: Any) -> None:
        rounded = cute.make_rmem_tensor(grads.layout, self.dtype)
        rounded.store(grads.load().to(self.dtype))
        place = tmem.columns(self.tmem["ds_t"](half) + first // 2, self.width // 2)
        tmem.store(cute.recast_tensor(rounded, cutlass.Float32), place, self.thread)
        self.ds.write(rounded, first=first // 8, zero=zero)

    def _part(self, values: cute.Tensor, first: int) -> cute.Tensor:
        return cute.make_tensor(values.iterator + first, cute.make_layout(self.width))

    def _indices(self, item: Any, half: Any, i: Any) -> tuple[Any, Any]:
        """The key, and the first query; told anew each time, so that the compiler keeps nothing
        that mods make of them for an element from block to block, or from P to dS."""
        first = cute.arch.shuffle_sync(i * self.spec.queries + half * self.spec.half, 0)
        key = cute.arch.shuffle_sync(item.tile * TILE + self.thread, cute.arch.lane_idx())
        return key, cute.arch.make_warp_uniform(first)

    def _row_values(self, half: Any, at: int, which: int, stage: Any) -> cute.Tensor:
        """LSE or delta of four queries: the same for all threads, a broadcast."""
        values = cute.make_rmem_tensor(cute.make_layout(4), cutlass.Float32)
        row = self.rows[None, which, stage]
        place = half * (self.spec.half // 4) + at // 4
        cute.autovec_copy(cute.local_tile(row, (4,), (place,)), values)
        return values


def _two(values: cute.Tensor, i: int) -> tuple[Any, Any]:
    """Two consecutive values as float32."""
    if values.element_type is cutlass.Float32:
        return values[i], values[i + 1]
    word = cute.recast_tensor(values, cutlass.Int32)[i // 2]
    if values.element_type is cutlass.BFloat16:  # whose bits are the upper ones of a float32
        low, high = word << 16, word & -(1 << 16)
        return low.bitcast(cutlass.Float32), high.bitcast(cutlass.Float32)
    return values[i].to(cutlass.Float32), values[i + 1].to(cutlass.Float32)
