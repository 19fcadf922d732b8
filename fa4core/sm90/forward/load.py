"""The load role: one warp that brings Q, K and V into shared memory by TMA.

The only role that knows where sequences lie; how keys are found is said in
`fa4core.forward.blocks`, and how rows behind a sequence are left out in `fa4core.forward.views`.
"""

from __future__ import annotations

from typing import Any

from cutlass import cute

from fa4core.forward.blocks import KeyBlocks, Part
from fa4core.forward.tma import Operand
from fa4core.lowering.cute import select
from fa4core.pipeline.effects import Fixed, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.sm90.forward.spec import ROWS, Spec


@cute.jit
def load(work: Any, plan: Any, ends: Ends):
    """K and V block by block, K0 V0 K1 V1 ..., with Q of every consumer behind K0.

    K0 is loaded ahead, while the consumers still work on the tile before; Q has to wait for them.
    """
    in_q = ends.inside("rows", "q")
    q, q_free = ends.posts("q_full"), ends.waits("q_empty")
    k, k_free = ends.posts("k_full"), ends.waits("k_empty")
    v, v_free = ends.posts("v_full"), ends.waits("v_empty")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        if item.blocks > 0:
            begin = plan.run(item.first_run)
            pages = work.pages(item, begin.first)
            k_free.wait()
            work.load_k(item, begin.first, pages, k.stage, barrier=k.expect(work.k_bytes))
            k.advance()
            k_free.advance()
        if (item.blocks > 0) | in_q:
            for t in work.tiles:
                q_free.wait(t)
                work.load_q(item, t, barrier=q.expect(work.q_bytes, t))
            q_free.advance()
        done = 1
        for r in range(item.first_run, item.end_run):
            run = plan.run(r)
            for j in range(run.first, run.end):
                pages = work.pages(item, j)
                if done == 0:
                    k_free.wait()
                    work.load_k(item, j, pages, k.stage, barrier=k.expect(work.k_bytes))
                    k.advance()
                    k_free.advance()
                done = 0
                v_free.wait()
                work.load_v(item, j, pages, v.stage, barrier=v.expect(work.v_bytes))
                v.advance()
                v_free.advance()
        index = source.next(index)


class LoadWork(Fixed):
    """TMA copies of one tile each.

    Attributes:
        q: The operand, of `views.keys`, or of `views.queries` where heads are packed.
        keys: Brings K and V.
    """

    def __init__(self, spec: Spec, operands: dict[str, Operand], pages: tuple):
        self.spec, self.tiles, self.q = spec, tuple(range(spec.tiles)), operands["q"]
        columns = {"k": spec.d, "v": spec.d_v}
        self.q_bytes = spec.rows * spec.d * 2
        self.k_bytes, self.v_bytes = (spec.block * n * 2 for n in columns.values())
        copies, rows = spec.block // spec.key_rows, spec.key_rows
        parts = {name: Part(0, 0, copies, (rows, n)) for name, n in columns.items()}
        self.keys = KeyBlocks(spec, operands, parts, pages)

    @touches(lambda item, t, barrier: (writes("q", t),), unit="tma")
    def load_q(self, item: Any, t: Any, barrier: Any) -> None:
        spec = self.spec
        row = (item.tile * spec.tiles + t) * spec.queries
        # A query tile behind the last one gets the first: see `KeyBlocks.page_place`.
        row = select(row < item.seqlen_q, row, 0, "int")
        if spec.packed == 1:
            there, first = self.q.rows_of(item.b_q, item.h, item.start_q, item.seqlen_q, row)
            self.q.load(there, (first, 0), (ROWS, spec.d), (0, t), barrier)
        else:
            there = self.q.view[(None, None, None, item.h, item.b_q)]
            first = 0, item.start_q + row, 0
            self.q.load(there, first, (*spec.q_rows, spec.d), (0, t), barrier)

    def pages(self, item: Any, j: Any) -> Any:
        return self.keys.pages(item, j)

    @touches(lambda item, j, pages, stage, barrier: (writes("k", stage),), unit="tma")
    def load_k(self, item: Any, j: Any, pages: Any, stage: Any, barrier: Any) -> None:
        self.keys.load("k", item, j, pages, stage, barrier)

    @touches(lambda item, j, pages, stage, barrier: (writes("v", stage),), unit="tma")
    def load_v(self, item: Any, j: Any, pages: Any, stage: Any, barrier: Any) -> None:
        self.keys.load("v", item, j, pages, stage, barrier)
