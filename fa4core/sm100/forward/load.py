"""The load role: one warp that brings Q, K and V into shared memory by TMA.

How keys are found is said in `fa4core.forward.blocks`.
"""

from __future__ import annotations

from typing import Any

from cutlass import cute

from fa4core.forward.blocks import KeyBlocks, Part
from fa4core.forward.tma import Operand
from fa4core.pipeline.effects import Fixed, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.pipeline.loop import range
from fa4core.sm100.forward.spec import TILE, Spec


@cute.jit
def load(work: Any, plan: Any, ends: Ends):
    """K0 Q V0 K1 V1 ...: a work tile's Q may have to wait until the one before has used its own."""
    q, q_free = ends.posts("q_full"), ends.waits("q_empty")
    kv, kv_free = ends.posts("kv_full"), ends.waits("kv_empty")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        waiting = True
        for r in range(item.first_run, item.end_run):
            run = plan.run(r)
            for j in range(run.first, run.end, unroll=1):
                pages = work.pages(item, j)
                kv_free.wait()
                work.load_k(item, j, pages, kv.stage, barrier=kv.expect(work.k_bytes))
                kv.advance()
                kv_free.advance()
                if waiting:
                    for t in work.tiles:
                        q_free.wait(t)
                        work.load_q(item, t, barrier=q.expect(work.q_bytes, t))
                    q_free.advance()
                    waiting = False
                kv_free.wait()
                work.load_v(item, j, pages, kv.stage, barrier=kv.expect(work.v_bytes))
                kv.advance()
                kv_free.advance()
        index = source.next(index)
    q_free.drain(work.tiles)
    kv_free.drain()


class LoadWork(Fixed):
    """TMA copies of one tile each.

    Attributes:
        q: The operand.
        keys: Brings K and V. Of the CTAs that share an MMA each has some rows of K and some columns
            of V.
    """

    def __init__(self, spec: Spec, operands: dict[str, Operand], pages: tuple, cta: Any):
        self.spec, self.tiles, self.q = spec, tuple(range(spec.tiles)), operands["q"]
        self.q_bytes, self.k_bytes = spec.rows * spec.d * 2, spec.keys * spec.d * 2
        self.v_bytes = TILE * spec.columns * 2
        parts = {
            "k": Part(cta * spec.keys, 0, spec.keys // spec.k_rows, (spec.k_rows, spec.d)),
            "v": Part(0, cta * spec.columns, TILE // spec.key_rows, (spec.key_rows, spec.columns)),
        }
        self.keys = KeyBlocks(spec, operands, parts, pages)

    @touches(lambda item, t, barrier: (writes("q", t),), unit="tma")
    def load_q(self, item: Any, t: Any, barrier: Any) -> None:
        first = item.start_q + (item.tile * self.spec.tiles + t) * self.spec.queries
        there = self.q.view[(None, None, None, item.h, item.b_q)]
        self.q.load(there, (0, first, 0), (*self.spec.q_rows, self.spec.d), (0, t), barrier)

    def pages(self, item: Any, j: Any) -> Any:
        return self.keys.pages(item, j)

    @touches(lambda item, j, pages, stage, barrier: (writes("kv", stage),), unit="tma")
    def load_k(self, item: Any, j: Any, pages: Any, stage: Any, barrier: Any) -> None:
        self.keys.load("k", item, j, pages, stage, barrier)

    @touches(lambda item, j, pages, stage, barrier: (writes("kv", stage),), unit="tma")
    def load_v(self, item: Any, j: Any, pages: Any, stage: Any, barrier: Any) -> None:
        self.keys.load("v", item, j, pages, stage, barrier)
