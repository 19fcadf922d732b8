"""The MMA role: one warp that issues both matrix products to the tensor core."""

from __future__ import annotations

from typing import Any

from cutlass import cute

from fa4core.pipeline.effects import Fixed, reads, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.pipeline.loop import range
from fa4core.sm100.forward.spec import PARTS, TILE, Spec
from fa4core.sm100.umma import in_tensor, issue

STEPS = TILE // 16  # instructions that P V takes for a block
LAST_STEPS = STEPS // PARTS


@cute.jit
def mma(work: Any, plan: Any, ends: Ends):
    """S0, S1, then block by block: (P0 V, next S0), (P1 V, next S1).

    The next S may be of the next work tile, so that one tile's end overlaps the next one's start.
    """
    q, q_free = ends.waits("q_full"), ends.posts("q_empty")
    kv, kv_free = ends.waits("kv_full"), ends.posts("kv_empty")
    s, o = ends.posts("s_full"), ends.posts("o_full")
    p, p_last = ends.waits("p_ready"), ends.waits("p_last")
    source = plan.source(ends)
    index = source.first()
    unfinished = 0  # key blocks of a work tile whose last P V is still to be issued, with V in `v`
    v = kv.stage
    while index < plan.count:
        item = plan.item(index)
        k = kv.stage
        if item.blocks > 0:
            k = kv.take()
        for t in work.tiles:
            if unfinished > 0:
                p.wait(t)
                work.pv(t, v, unfinished > 1)
                p_last.wait(t)
                work.pv_last(t, v)
                o.arrive(t)
                if t == work.tiles[-1]:
                    kv_free.arrive(stage=v)
            if item.blocks > 0:
                q.wait(t)
                work.qk(t, k)
                s.arrive(t)
        if unfinished > 0:
            p.advance()
            p_last.advance()
        if item.blocks > 0:
            if not work.holds_k:
                kv_free.arrive(stage=k)
            v = kv.take()
            for i in range(item.blocks - 1, unroll=1):
                used = k
                k = kv.take()
                for t in work.tiles:
                    p.wait(t)
                    work.pv(t, v, i > 0)
                    p_last.wait(t)
                    work.pv_last(t, v)
                    if work.holds_k and t == work.tiles[0]:
                        kv_free.arrive(stage=used)
                    if t == work.tiles[-1]:
                        kv_free.arrive(stage=v)  # not behind Q K^T, which loads would slow down
                    work.qk(t, k)
                    s.arrive(t)
                p.advance()
                p_last.advance()
                if not work.holds_k:
                    kv_free.arrive(stage=k)
                v = kv.take()
            if work.holds_k:
                kv_free.arrive(stage=k)
            for t in work.tiles:
                q_free.arrive(t)
            q.advance()
        unfinished = item.blocks
        index = source.next(index)
    if unfinished > 0:
        for t in work.tiles:
            p.wait(t)
            work.pv(t, v, unfinished > 1)
            p_last.wait(t)
            work.pv_last(t, v)
            o.arrive(t)
        kv_free.arrive(stage=v)


class MmaWork(Fixed):
    """The products of one tile and one block.

    Attributes:
        holds_k: Whether K is given back behind the next block's first P V, not behind its own last
            Q K^T. V is given back half a block before that. Loads that come in turns, half a block
            apart, take shared memory from products when those need least of it.
        s_kind, o_kind: Kinds of instruction.
        q, k, v: Operands in shared memory; k and v by stage of the ring.
        s, p, o: Addresses in tensor memory, by tile.
    """

    def __init__(self, spec: Spec, s_kind, o_kind, q, k, v, s, p, o):
        self.tiles, self.holds_k = tuple(range(spec.tiles)), spec.holds_k
        self.s_kind, self.o_kind = s_kind, o_kind
        self.q, self.k, self.v, self.s, self.p, self.o = q, k, v, s, p, o

    @touches(lambda t, stage: (reads("q", t), reads("kv", stage), writes("s", t)), unit="mma")
    def qk(self, t: int, stage: Any) -> None:
        """S_t = Q_t K^T."""
        issue(self.s_kind, self.s[t], self.q.at(t), self.k.at(stage), False)

    @touches(
        lambda t, stage, accumulate: (reads("p", t), reads("kv", stage), writes("o", t)), unit="mma"
    )
    def pv(self, t: int, stage: Any, accumulate: Any) -> None:
        """O_t (+)= P_t V over the keys of all but the last part of P."""
        self._pv(t, stage, accumulate, 0, STEPS - LAST_STEPS)

    @touches(lambda t, stage: (reads("p_last", t), reads("kv", stage), writes("o", t)), unit="mma")
    def pv_last(self, t: int, stage: Any) -> None:
        """O_t += P_t V over the keys of the last part of P."""
        self._pv(t, stage, True, STEPS - LAST_STEPS, STEPS)

    def _pv(self, t: int, stage: Any, accumulate: Any, first: int, end: int) -> None:
        p, v = in_tensor(self.p[t], STEPS), self.v.at(stage)
        issue(self.o_kind, self.o[t], p.steps(first, end), v.steps(first, end), accumulate)
