"""The reduce role: one warp that adds consumers' parts of dQ to global memory, each by a bulk copy.

Where the order of additions is fixed, whoever adds to a query tile waits until those before it have
been counted in `turns`, and counts itself when its own have arrived.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute

from fa4core.pipeline.effects import Fixed, drains, reads, touches
from fa4core.pipeline.endpoint import Ends
from fa4core.sm90.backward.spec import Spec
from fa4core.sm90.backward.tiles import place_of
from fa4core.sm90.memory import add_bulk


@cute.jit
def reduce(work: Any, plan: Any, ends: Ends):
    """The parts of every query tile in the order in which consumers finish them."""
    full, free = ends.waits("grad_q_full"), ends.posts("grad_q_empty")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        for r in range(item.first_run, item.end_run):
            run = plan.run(r)
            for j in range(run.first, run.end):
                work.wait_turn(item, run, j, plan.turn(run, j))
                for part in work.passes:
                    for t in work.groups:
                        full.wait(t)
                        work.add(item, run, j, part, t)
                    full.advance()
                    for t in work.groups:
                        work.stored(work.groups[-1] - t)
                        free.arrive(t)
                work.end_turn(item, run, j)
        work.finished()
        index = source.next(index)


class ReduceWork(Fixed):
    """Additions to dQ.

    Attributes:
        sums: Padded dQ, (heads, rows, d); how tiles lie in it says `RowSpec.part`.
        shared: (numbers of a part, groups) in shared memory.
        turns: (heads, rows / queries), how many have added to each tile where the order is fixed.
    """

    def __init__(self, spec: Spec, sums, shared, turns):
        self.spec, self.groups = spec, tuple(range(spec.shape.groups))
        self.passes = tuple(range(spec.shape.passes))
        self.sums, self.shared, self.turns = sums, shared, turns

    @touches(lambda item, run, j, part, t: (reads("grad_q", t),), unit="store")
    def add(self, item: Any, run: Any, j: Any, part: int, t: int) -> None:
        """One warpgroup's part, begun."""
        place = place_of(self.spec, self.sums, t, item, run.head, j, part)
        with cute.arch.elect_one():
            add_bulk(self.shared[(None, t)], place)
        cute.arch.cp_async_bulk_commit_group()

    @drains("store")
    def stored(self, left: int) -> None:
        """Wait until TMA has read all parts but `left`."""
        cute.arch.cp_async_bulk_wait_group(left, read=True)

    def finished(self) -> None:
        """Wait until what was added has arrived: a kernel may follow that reads it."""
        cute.arch.cp_async_bulk_wait_group(0)

    def wait_turn(self, item: Any, run: Any, j: Any, turn: Any) -> None:
        if self.spec.deterministic:
            _wait(self._counter(item, run, j), turn)

    def end_turn(self, item: Any, run: Any, j: Any) -> None:
        if self.spec.deterministic:
            cute.arch.cp_async_bulk_wait_group(0)
            cute.arch.fence_proxy("async.global")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                one = cutlass.Int32(1)
                cute.arch.atomic_add(self._counter(item, run, j), one, sem="release", scope="gpu")

    def _counter(self, item: Any, run: Any, j: Any) -> cute.Pointer:
        at = (item.h + run.head, item.rows_q // self.spec.queries + j)
        return self.turns.iterator + cute.crd2idx(at, self.turns.layout)


@cute.jit
def _wait(counter: cute.Pointer, turn: Any):
    """Until the counter is `turn`, and everything that was counted is visible."""
    seen = cute.arch.load(counter, cutlass.Int32, sem="acquire", scope="gpu")
    while seen != turn:
        seen = cute.arch.load(counter, cutlass.Int32, sem="acquire", scope="gpu")
    cute.arch.fence_proxy("async.global")
