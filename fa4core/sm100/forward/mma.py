"""The MMA role: one warp that issues both matrix products to the tensor core."""

from __future__ import annotations

from typing import Any

from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

from fa4core.pipeline.effects import Fixed, reads, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.sm100.forward.spec import PARTS, Spec


@cute.jit
def mma(work: Any, plan: Any, ends: Ends):
    """S0, S1, then block by block: (P0 V, next S0), (P1 V, next S1)."""
    q, q_free = ends.waits("q_full"), ends.posts("q_empty")
    kv, kv_free = ends.waits("kv_full"), ends.posts("kv_empty")
    s, o = ends.posts("s_full"), ends.posts("o_full")
    p, p_last = ends.waits("p_ready"), ends.waits("p_last")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        if item.blocks > 0:
            k = kv.take()
            for t in work.tiles:
                q.wait(t)
                work.qk(t, k)
                s.arrive(t)
            kv_free.arrive(stage=k)
            for i in range(item.blocks - 1):
                v = kv.take()
                k = kv.take()
                for t in work.tiles:
                    p.wait(t)
                    work.pv(t, v, i > 0)
                    p_last.wait(t)
                    work.pv_last(t, v)
                    work.qk(t, k)
                    s.arrive(t)
                p.advance()
                p_last.advance()
                kv_free.arrive(stage=v)
                kv_free.arrive(stage=k)
            for t in work.tiles:
                q_free.arrive(t)
            v = kv.take()
            for t in work.tiles:
                p.wait(t)
                work.pv(t, v, item.blocks > 1)
                p_last.wait(t)
                work.pv_last(t, v)
                o.arrive(t)
            p.advance()
            p_last.advance()
            kv_free.arrive(stage=v)
            q.advance()
        index = source.next(index)


class MmaWork(Fixed):
    """The products of one tile and one block.

    Attributes:
        make_qk, make_pv: Make a tiled MMA; a fresh one for each product, because setting a field of
            one inside a loop would change it outside.
        q, k, v: Operand fragments in shared memory; the last mode is the stage.
        s, p, o: Accumulators and the operand in tensor memory, by tile.
    """

    def __init__(self, spec: Spec, make_qk, make_pv, q, k, v, s, p, o):
        self.tiles = tuple(range(spec.tiles))
        self.make_qk, self.make_pv = make_qk, make_pv
        self.q, self.k, self.v, self.s, self.p, self.o = q, k, v, s, p, o

    @touches(lambda t, stage: (reads("q", t), reads("kv", stage), writes("s", t)), unit="mma")
    def qk(self, t: int, stage: Any) -> None:
        """S_t = Q_t K^T."""
        product = self.make_qk()
        for step in range(cute.size(self.q, mode=[2])):
            product.set(tcgen05.Field.ACCUMULATE, step > 0)
            q, k = self.q[(None, None, step, t)], self.k[(None, None, step, stage)]
            cute.gemm(product, self.s[t], q, k, self.s[t])

    @touches(
        lambda t, stage, accumulate: (reads("p", t), reads("kv", stage), writes("o", t)), unit="mma"
    )
    def pv(self, t: int, stage: Any, accumulate: Any) -> None:
        """O_t (+)= P_t V over the keys of all but the last part of P."""
        self._pv(t, stage, accumulate, last=False)

    @touches(lambda t, stage: (reads("p_last", t), reads("kv", stage), writes("o", t)), unit="mma")
    def pv_last(self, t: int, stage: Any) -> None:
        """O_t += P_t V over the keys of the last part of P."""
        self._pv(t, stage, True, last=True)

    def _pv(self, t: int, stage: Any, accumulate: Any, last: bool) -> None:
        product = self.make_pv()
        steps = cute.size(self.p[t], mode=[2])
        middle = steps * (PARTS - 1) // PARTS
        for step in range(middle, steps) if last else range(middle):
            product.set(tcgen05.Field.ACCUMULATE, accumulate if step == 0 else True)
            p, v = self.p[t][(None, None, step)], self.v[(None, None, step, stage)]
            cute.gemm(product, self.o[t], p, v, self.o[t])
