"""The reduce role: four warps that add dQ of every block to the accumulator in global memory.

A thread has a query. A warp stages its 32 rows and adds them by TMA, a few columns at a time,
without waiting for other warps. In deterministic mode it waits for its turn: the counter of a query
tile counts the warps that have added to it.
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
from fa4core.sm100.backward.spec import ADDED, ADDED_STAGES, TILE, Spec

WARPS = TILE // WARP


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
                        work.settle(work.ahead[part])
                        work.stage(part, values)
                        work.add(item, head, i, part)
                if const_expr(work.deterministic):
                    work.finish(0)
                    work.give_turn(item, head, i)
        index = source.next(index)
    work.settle(0)  # shared memory lives no longer than this


class ReduceWork(Fixed):
    """What a thread does with its query.

    Attributes:
        thread: 0..127 within the warpgroup.
        dq: Address in tensor memory.
        staged: The row in shared memory.
        sums: Of (rows, d, heads_q) in global memory, padded.
        turns: (tiles, heads_q) counters; only if the order is fixed.
        groups: Parts that are held in registers at once.
        ahead: See `Spec.parts_ahead`.
    """

    def __init__(self, spec: Spec, thread, dq, staged, sums: Operand, turns):
        self.spec, self.thread, self.dq = spec, thread, dq
        self.staged, self.sums, self.turns = staged, sums, turns
        self.groups, self.ahead = spec.dq_groups, spec.parts_ahead
        self.deterministic = spec.deterministic

    @touches(lambda group: (reads("dq", 0), reads("dq", 1)))
    def load(self, group: tuple[int, ...]) -> cute.Tensor:
        """Columns of the thread's row, into registers."""
        values = cute.make_rmem_tensor(cute.make_layout(len(group) * ADDED), cutlass.Float32)
        for n, part in enumerate(group):
            width = min(ADDED, self.spec.d - part * ADDED)
            place = tmem.columns(self.dq + part * ADDED, width)
            to = cute.make_tensor(values.iterator + n * ADDED, cute.make_layout(width))
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

    @touches(lambda part, values: (writes("added", part % ADDED_STAGES),))
    def stage(self, part: int, values: cute.Tensor) -> None:
        """A part of the thread's row, to shared memory."""
        held, width = part % len(self.groups[0]) * ADDED, min(ADDED, self.spec.d - part * ADDED)
        of = cute.make_tensor(values.iterator + held, cute.make_layout(width))
        self.staged.write(of, part % ADDED_STAGES)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    @touches(lambda item, head, i, part: (reads("added", part % ADDED_STAGES),), unit="store")
    def add(self, item: Any, head: Any, i: Any, part: int) -> None:
        """The warp's rows of a part, begun."""
        warp = cute.arch.make_warp_uniform(self.thread // WARP)
        first = item.rows_q + i * TILE + warp * WARP
        there = self.sums.view[None, None, head]
        place = warp, part % ADDED_STAGES
        self.sums.store(there, (first, part * ADDED), (WARP, ADDED), place)
        cute.arch.cp_async_bulk_commit_group()

    def wait_for_turn(self, item: Any, head: Any, i: Any, turn: Any) -> None:
        """Until all others that come before have added their share, in deterministic mode."""
        if self.deterministic:
            _wait(self._turns(item, head, i), turn * WARPS)

    def give_turn(self, item: Any, head: Any, i: Any) -> None:
        """Count this warp, whose share has been added."""
        _count(self._turns(item, head, i))

    def _turns(self, item: Any, head: Any, i: Any) -> cute.Pointer:
        counters = cute.domain_offset((item.rows_q // TILE + i,), self.turns[None, head])
        return counters.iterator


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
