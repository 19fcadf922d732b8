"""The MMA role: one warp that issues all five matrix products to the tensor core."""

from __future__ import annotations

from typing import Any

import attrs
from cutlass import const_expr, cute

from fa4core.pipeline.effects import Fixed, reads, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.pipeline.loop import range
from fa4core.sm100.backward.spec import HALVES, Spec
from fa4core.sm100.umma import K_COLUMNS, InShared, Instruction, Place, issue


@cute.jit
def mma(work: Any, plan: Any, ends: Ends):
    """S, dP, dV of the first block; then S of each next block, dK and dQ of the one before it, and
    dP and dV of the next; at the end dK and dQ of the last. With room for a single tile of Q, S
    comes behind dK and dQ."""
    k, k_free = ends.waits("k_full"), ends.posts("k_empty")
    v, v_free = ends.waits("v_full", optional=True), ends.posts("v_empty", optional=True)
    q, q_free = ends.waits("q_full"), ends.posts("q_empty")
    do, do_free = ends.waits("do_full"), ends.posts("do_empty")
    s, p = ends.posts("s_full"), ends.waits("p_ready")
    dp, ds = ends.posts("dp_full", optional=True), ends.waits("ds_ready", optional=True)
    dq, dq_free = ends.posts("dq_full", optional=True), ends.waits("dq_empty", optional=True)
    grads = ends.posts("grads_full")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        if item.blocks > 0:
            k.take()
            this = q.take()
            work.scores(this)
            s.arrive()
            v.take()
            for i in range(item.blocks, unroll=1):
                # the first round has no block before it, and nothing to add to
                if i > 0:
                    following = this
                    if const_expr(work.ahead):
                        following = q.take()
                        work.scores(following)
                        s.arrive()
                    if const_expr(work.with_k):
                        ds.take()
                        work.grad_k(this, i > 1)
                        q_free.arrive(stage=this)
                        if const_expr(work.dq_apart):
                            dq_free.take()
                        work.grad_q()
                        dq.arrive()
                    if const_expr(not work.ahead):
                        following = q.take()
                        work.scores(following)
                        s.arrive()
                    this = following
                do.take()
                if const_expr(work.with_k):
                    if const_expr(not work.dq_apart):
                        dq_free.take()
                    work.grad_p()
                    dp.arrive()
                p.take()
                if const_expr(work.with_v):
                    work.grad_v(i > 0)
                do_free.arrive()
                if const_expr(not work.with_k):
                    q_free.arrive(stage=this)
            if const_expr(work.with_k):
                v_free.arrive()
                ds.take()
                work.grad_k(this, item.blocks > 1)
                q_free.arrive(stage=this)
                if const_expr(work.dq_apart):
                    dq_free.take()
                work.grad_q()
                dq.arrive()
            k_free.arrive()
            grads.arrive()
        index = source.next(index)


@attrs.frozen(eq=False)
class Operands:
    """Operands in shared memory, by what they are multiplied to; None of what isn't computed."""

    s: tuple[InShared, InShared]
    dv: InShared | None
    dp: tuple[InShared, InShared] | None
    dk: InShared | None
    dq: tuple[InShared, InShared] | None


class MmaWork(Fixed):
    """The products of one block.

    Attributes:
        kinds: Instructions, by the name of the result.
        operands: In shared memory.
        tmem: Address of each region of tensor memory, by name.
    """

    def __init__(
        self, spec: Spec, kinds: dict[str, Instruction], operands: Operands, tmem: dict[str, Any]
    ):
        self.kinds, self.operands, self.tmem = kinds, operands, tmem
        self.spec, self.dq_apart, self.ahead = spec, spec.dq_apart, spec.ahead
        self.with_v, self.with_k = spec.with_v, spec.with_k

    @touches(
        lambda stage: (reads("k"), reads("q", stage), writes("s", 0), writes("s", 1)), unit="mma"
    )
    def scores(self, stage: Any) -> None:
        """S^T = K Q^T."""
        k, q = self.operands.s
        issue(self.kinds["s"], self.tmem["s"], k.at(0), q.at(stage), False)

    @touches(lambda: (reads("v"), reads("do"), writes("dp", 0), writes("dp", 1)), unit="mma")
    def grad_p(self) -> None:
        """dP^T = V dO^T."""
        v, do = self.operands.dp
        issue(self.kinds["dp"], self.tmem["dp"], v.at(0), do.at(0), False)

    @touches(
        lambda accumulate: (reads("p", 0), reads("p", 1), reads("do"), writes("dv")), unit="mma"
    )
    def grad_v(self, accumulate: Any) -> None:
        """dV (+)= P^T dO."""
        a, b = self._in_halves("p"), self.operands.dv.at(0)
        issue(self.kinds["dv"], self.tmem["dv"], a, b, accumulate)

    @touches(
        lambda stage, accumulate: (
            reads("ds_t", 0), reads("ds_t", 1), reads("q", stage), writes("dk")
        ),
        unit="mma",
    )  # fmt: skip
    def grad_k(self, stage: Any, accumulate: Any) -> None:
        """dK (+)= dS^T Q."""
        a, b = self._in_halves("ds_t"), self.operands.dk.at(stage)
        issue(self.kinds["dk"], self.tmem["dk"], a, b, accumulate)

    @touches(
        lambda: (reads("ds", 0), reads("ds", 1), reads("k"), writes("dq")),
        unit="mma",
    )
    def grad_q(self) -> None:
        """dQ = dS K, or groups of rows of dQ^T = K^T dS^T."""
        a, b = self.operands.dq
        for n in range(len(self.spec.dq_firsts)):
            to = self.tmem["dq"] + n * self.spec.queries
            issue(self.kinds["dq"], to, a.at(n), b.at(0), False)

    def _in_halves(self, name: str) -> Place:
        """A 16-bit operand in tensor memory, each half of its queries where float32 values were."""
        half, steps = self.spec.half, self.spec.half // 16
        starts = [half * (i // steps) + K_COLUMNS * (i % steps) for i in range(HALVES * steps)]
        return Place(self.tmem[name], None, starts)
