"""The reduce role: four warps that add dQ of every block to the accumulator in global memory.

A thread has a query; in a pair, whose CTAs have half of the queries each, half of its columns; of a
transposed dQ a column of the head dim. A warp stages 32 rows and adds them by TMA, a few columns at
a time (`tuning.Share`), without waiting for other warps. In deterministic mode it waits for its
turn: the counter of a query tile counts the warps, of both CTAs, that have added to it.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import const_expr, cute

from fa4core.forward.tma import Operand
from fa4core.pipeline.declare import WARP
from fa4core.pipeline.effects import Fixed, drains, reads, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.sm100 import tmem
from fa4core.sm100.backward.spec import Spec

WARPS = 4  # of the role


@cute.jit
def reduce(work: Any, plan: Any, ends: Ends):
    """Block by block: dQ out of tensor memory, which is free then, and added part by part."""
    dq, dq_free = ends.waits("dq_full"), ends.posts("dq_empty")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        for r in range(item.first_run, item.end_run):
            run = plan.run(r)
            head = item.h + run.head
            for i in range(run.first, run.end):
                dq.take()
                for group in work.groups:
                    values = work.load(group)
                    if const_expr(group is work.groups[-1]):
                        dq_free.arrive()
                    if const_expr(group is work.groups[0]):
                        work.wait_for_turn(item, head, i, plan.turn(run, i))
                    for part in group:
                        work.settle(work.parts_ahead[part])
                        work.stage(part, part % work.stages, values)
                        work.add(item, head, i, part, part % work.stages)
                if const_expr(work.deterministic):
                    work.finish(0)
                    work.give_turn(item, head, i)
        index = source.next(index)
    work.settle(0)  # shared memory lives no longer than this


class ReduceWork(Fixed):
    """What a thread does with its query.

    Attributes:
        thread: 0..127 within the warpgroup.
        cta: Rank of the CTA in its pair.
        dq: Address in tensor memory.
        staged: The row, or the column, in shared memory.
        sums: Of (rows, d, heads_q) in global memory, padded.
        turns: (tiles, heads_q) counters; only if the order is fixed.
        shares: What is added at once.
        groups: Shares that are held in registers at once, by number.
        parts_ahead: See `Spec`.
    """

    def __init__(self, spec: Spec, thread, cta, dq, staged, sums: Operand, turns):
        self.spec, self.thread, self.cta, self.dq = spec, thread, cta, dq
        self.staged, self.sums, self.turns = staged, sums, turns
        self.shares, self.groups, self.parts_ahead = spec.shares, spec.held, spec.parts_ahead
        self.deterministic, self.warps = spec.deterministic, WARPS * spec.ctas
        self.stages = spec.stages.added

    @touches(lambda group: (reads("dq"),))
    def load(self, group: tuple[int, ...]) -> cute.Tensor:
        """Columns of the thread's lane, into registers."""
        most = self.spec.added
        values = cute.make_rmem_tensor(cute.make_layout(len(group) * most), cutlass.Float32)
        for n, part in enumerate(group):
            width = self.shares[part].columns
            place = tmem.columns(self.dq + part * most, width)
            to = cute.make_tensor(values.iterator + n * most, cute.make_layout(width))
            tmem.load(place, to, self.thread)
        cute.arch.fence_view_async_tmem_load()
        return values

    @drains("store")
    def settle(self, left: int) -> None:
        """Wait until TMA has read all staged parts but `left`."""
        cute.arch.cp_async_bulk_wait_group(left, read=True)
        cute.arch.sync_warp()

    @drains("store")
    def finish(self, left: int) -> None:
        """Wait until all parts but `left` have been added."""
        cute.arch.cp_async_bulk_wait_group(left)
        cute.arch.sync_warp()

    @touches(lambda part, stage, values: (writes("added", stage),))
    def stage(self, part: int, stage: int, values: cute.Tensor) -> None:
        """A part of the thread's lane, to shared memory."""
        held, width = part % len(self.groups[0]) * self.spec.added, self.shares[part].columns
        of = cute.make_tensor(values.iterator + held, cute.make_layout(width))
        self.staged.write(of, stage)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    @touches(lambda item, head, i, part, stage: (reads("added", stage),), unit="store")
    def add(self, item: Any, head: Any, i: Any, part: int, stage: int) -> None:
        """The warp's rows of a part, begun."""
        warp, warps = cute.arch.make_warp_uniform(self.thread // WARP), self.spec.warps_down
        share, first = self.shares[part], item.rows_q + i * self.spec.queries
        row = first + self.cta * self.spec.rows + share.row + warp % warps * WARP
        column = warp // warps * self.spec.columns_apart + share.column
        if share.first_warp == 0:
            self.store(head, (row, column), warp, stage)
        else:
            _store_from(self, share.first_warp, head, (row, column), warp, stage)
        cute.arch.cp_async_bulk_commit_group()

    def store(self, head: Any, first: tuple[Any, Any], warp: Any, stage: int) -> None:
        there = self.sums.view[None, None, head]
        self.sums.store(there, first, (WARP, self.spec.added), (warp, stage))

    def wait_for_turn(self, item: Any, head: Any, i: Any, turn: Any) -> None:
        """Until all others that come before have added their share, in deterministic mode."""
        if self.deterministic:
            _wait(self._turns(item, head, i), turn * self.warps)

    def give_turn(self, item: Any, head: Any, i: Any) -> None:
        """Count this warp, whose share has been added."""
        _count(self._turns(item, head, i))

    def _turns(self, item: Any, head: Any, i: Any) -> cute.Pointer:
        tile = item.rows_q // self.spec.queries + i
        return cute.domain_offset((tile,), self.turns[None, head]).iterator


@cute.jit
def _store_from(work: Any, first_warp: int, head: Any, first: Any, warp: Any, stage: int):
    if warp >= first_warp:
        work.store(head, first, warp, stage)


@cute.jit
def _wait(counter: cute.Pointer, until: Any):
    if cute.arch.lane_idx() == 0:
        count = cute.arch.load(counter, cutlass.Int32, sem="acquire", scope="gpu")
        while count < until:
            count = cute.arch.load(counter, cutlass.Int32, sem="acquire", scope="gpu")
        cute.arch.fence_proxy("async.global")
    cute.arch.sync_warp()


@cute.jit
def _count(counter: cute.Pointer):
    if cute.arch.lane_idx() == 0:
        cute.arch.fence_proxy("async.global")
        cute.arch.red(counter, cutlass.Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
