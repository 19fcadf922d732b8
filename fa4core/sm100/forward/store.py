"""The store role: one warp that brings finished parts of O from shared memory to global memory.

It leaves the correction role free for the next work tile while TMA still reads this one's. A
sequence ends where it ends (`views.results`): TMA clips the rows behind it.
"""

from __future__ import annotations

from typing import Any

from cutlass import cute

from fa4core.forward.rows import results_batch
from fa4core.forward.tma import Operand
from fa4core.pipeline.effects import Fixed, reads, touches
from fa4core.pipeline.endpoint import Ends
from fa4core.sm100.forward.spec import Spec


@cute.jit
def store(work: Any, plan: Any, ends: Ends):
    """Part by part of every query tile, in the order in which the correction role stages them."""
    out, out_free = ends.waits("out_full"), ends.posts("out_empty")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        for t in work.tiles:
            for part in work.parts:
                out.wait()
                work.store(item, t, part, out.stage)
                out_free.arrive()
                out.advance()
                out_free.advance()
        index = source.next(index)


class StoreWork(Fixed):
    """TMA copies of one part each.

    Attributes:
        out: Of `views.results`.
        place: (queries' rows in a batch entry, batch entries of queries).
    """

    def __init__(self, spec: Spec, out: Operand, place: tuple):
        self.spec, self.out = spec, out
        self.rows_of_batch, self.batches = place
        self.tiles, self.parts = tuple(range(spec.tiles)), tuple(range(spec.out_parts))

    @touches(lambda item, t, part, stage: (reads("out", stage),))
    def store(self, item: Any, t: int, part: int, stage: Any) -> None:
        """Returns when TMA has read the stage."""
        first = (item.tile * self.spec.tiles + t) * self.spec.queries
        start = results_batch(self.spec, item, self.batches) * self.rows_of_batch + item.start_q
        view = self.out.view
        there = view[(None, None, None, item.h, start + item.seqlen_q)]
        offset = 0, view.shape[1] - item.seqlen_q + first, part * self.spec.out_columns
        shape = *self.spec.q_rows, self.spec.out_columns
        self.out.store(there, offset, shape, (0, stage))
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
