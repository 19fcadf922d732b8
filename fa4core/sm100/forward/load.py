"""The load role: one warp that brings Q, K and V into shared memory by TMA.

The only role that knows where keys lie. K and V end exactly where their sequence does, whatever
follows it in memory (`views.keys`): TMA fills the rest with zeros, because P is 0 there and
0 * NaN is not.
"""

from __future__ import annotations

from typing import Any

from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from fa4core.pipeline.effects import Fixed, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.sm100.forward.spec import TILE, Spec
from fa4core.sm100.forward.views import q_rows


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

    Attributes:
        operands: "q", "k", "v" to (copy atom, view of global memory, shared memory), as `kernel`
            makes them; the last mode of shared memory is the stage.
    """

    def __init__(self, spec: Spec, operands: dict[str, tuple]):
        self.spec, self.operands = spec, operands
        self.tiles = tuple(range(spec.tiles))
        self.q_bytes, self.k_bytes = spec.rows * spec.d * 2, TILE * spec.d * 2
        self.v_bytes = TILE * spec.d_v * 2

    @touches(lambda item, t, barrier: (writes("q", t),), unit="tma")
    def load_q(self, item: Any, t: Any, barrier: Any) -> None:
        first = item.start_q + (item.tile * self.spec.tiles + t) * self.spec.queries
        _, source, _ = self.operands["q"]
        there = source[(None, None, None, item.h, item.b_q)]
        self._copy("q", there, (0, first, 0), (*q_rows(self.spec), self.spec.d), t, barrier)

    @touches(lambda item, j, stage, barrier: (writes("kv", stage),), unit="tma")
    def load_k(self, item: Any, j: Any, stage: Any, barrier: Any) -> None:
        self._copy_keys("k", item, j, self.spec.d, stage, barrier)

    @touches(lambda item, j, stage, barrier: (writes("kv", stage),), unit="tma")
    def load_v(self, item: Any, j: Any, stage: Any, barrier: Any) -> None:
        self._copy_keys("v", item, j, self.spec.d_v, stage, barrier)

    def _copy_keys(
        self, name: str, item: Any, j: Any, columns: int, stage: Any, barrier: Any
    ) -> None:
        _, source, _ = self.operands[name]
        there = source[(None, None, item.h_kv, item.b_k, item.start_k + item.seqlen_k)]
        first = source.shape[0] - item.seqlen_k + j * TILE
        self._copy(name, there, (first, 0), (TILE, columns), stage, barrier)

    def _copy(
        self, name: str, there: cute.Tensor, first: tuple, shape: tuple, stage: Any, barrier: Any
    ) -> None:
        atom, _, shared = self.operands[name]
        tile = cute.local_tile(cute.domain_offset(first, there), shape, (0,) * len(shape))
        to, of = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(shared, 0, len(shape)),
            cute.group_modes(tile, 0, len(shape)),
        )
        cute.copy(atom, of, to[(None, stage)], tma_bar_ptr=barrier)
