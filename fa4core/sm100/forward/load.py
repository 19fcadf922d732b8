"""The load role: one warp that brings Q, K and V into shared memory by TMA.

The only role that knows where sequences lie. Every operand is seen as (rows, d, head, batch, shift)
with rows and shift of the same stride: coordinates `rows - length + i` and `start + length` name
row `start + i` of the tensor, and leave the box exactly where the sequence ends, whatever follows
it in memory. TMA fills the rest with zeros, so that nothing behind a sequence is ever read.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from fa4core.pipeline.effects import Fixed, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.sm100.forward.spec import TILE, Spec


@cute.jit
def load(work: Any, plan: Any, ends: Ends):
    """Q of both tiles, then K and V block by block: K0 V0 K1 V1 ..."""
    q, q_free = ends.posts("q_full"), ends.waits("q_empty")
    kv, kv_free = ends.posts("kv_full"), ends.waits("kv_empty")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        if item.blocks > 0:
            for t in work.tiles:
                q_free.wait(t)
                work.load_q(item, t, barrier=q.expect(work.q_bytes, t))
            q_free.advance()
            for r in range(item.first_run, item.end_run):
                run = plan.run(r)
                for j in range(run.first, run.end):
                    kv_free.wait()
                    work.load_k(item, j, kv.stage, barrier=kv.expect(work.k_bytes))
                    kv.advance()
                    kv_free.advance()
                    kv_free.wait()
                    work.load_v(item, j, kv.stage, barrier=kv.expect(work.v_bytes))
                    kv.advance()
                    kv_free.advance()
        index = source.next(index)


class LoadWork(Fixed):
    """TMA copies of one tile each.

    `operands` maps "q", "k", "v" to (copy atom, coordinate tensor, shared memory, partition
    function), as `kernel` makes them.
    """

    def __init__(self, spec: Spec, operands: dict[str, tuple]):
        self.tiles = tuple(range(spec.tiles))
        self.operands = operands
        self.q_bytes, self.k_bytes = TILE * spec.d * 2, TILE * spec.d * 2
        self.v_bytes = TILE * spec.d_v * 2
        self.shapes = {"q": (TILE, spec.d), "k": (TILE, spec.d), "v": (spec.d_v, TILE)}

    @touches(lambda item, t, barrier: (writes("q", t),), unit="tma")
    def load_q(self, item: Any, t: Any, barrier: Any) -> None:
        row = (item.tile * len(self.tiles) + t) * TILE
        self._copy("q", row, item.seqlen_q, item.start_q, item.h, item.b_q, t, barrier)

    @touches(lambda item, j, stage, barrier: (writes("kv", stage),), unit="tma")
    def load_k(self, item: Any, j: Any, stage: Any, barrier: Any) -> None:
        place = (j * TILE, item.seqlen_k, item.start_k, item.h_kv, item.b_k)
        self._copy("k", *place, stage, barrier)

    @touches(lambda item, j, stage, barrier: (writes("kv", stage),), unit="tma")
    def load_v(self, item: Any, j: Any, stage: Any, barrier: Any) -> None:
        place = (j * TILE, item.seqlen_k, item.start_k, item.h_kv, item.b_k)
        self._copy("v", *place, stage, barrier)

    def _copy(
        self, name: str, row: Any, length: Any, start: Any, h: Any, b: Any, stage: Any, barrier: Any
    ) -> None:
        atom, source, shared, partition = self.operands[name]
        axis = 1 if name == "v" else 0
        rows = source.shape[axis]
        there = source[(None, None, h, b, start + length)]
        shift = [cutlass.Int32(0), cutlass.Int32(0)]
        shift[axis] = rows - length + row
        tile = cute.local_tile(cute.domain_offset(tuple(shift), there), self.shapes[name], (0, 0))
        to, of = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(shared, 0, 3),
            cute.group_modes(partition(tile), 0, 3),
        )
        cute.copy(atom, of, to[(None, stage)], tma_bar_ptr=barrier)
