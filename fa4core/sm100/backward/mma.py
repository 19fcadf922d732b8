"""The MMA role: one warp that issues all five matrix products to the tensor core."""

from __future__ import annotations

from typing import Any

import attrs
from cutlass import const_expr, cute

from fa4core.pipeline.effects import Fixed, reads, touches, writes
from fa4core.pipeline.endpoint import Ends
from fa4core.pipeline.loop import range
from fa4core.sm100.backward.spec import HALF, TILE, Spec
from fa4core.sm100.umma import K_COLUMNS, InShared, Instruction, Place, issue


@cute.jit
def mma(work: Any, plan: Any, ends: Ends):
    """S, dP, dV of the first block; then S of each next block, dK and dQ of the one before it, and
    dP and dV of the next; at the end dK and dQ of the last."""
    k, k_free = ends.waits("k_full"), ends.posts("k_empty")
    v, v_free = ends.waits("v_full"), ends.posts("v_empty")
    q, q_free = ends.waits("q_full"), ends.posts("q_empty")
    do, do_free = ends.waits("do_full"), ends.posts("do_empty")
    s, p = ends.posts("s_full"), ends.waits("p_ready")
    dp, ds = ends.posts("dp_full"), ends.waits("ds_ready")
    dq, dq_free = ends.posts("dq_full"), ends.waits("dq_empty")
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
                    following = q.take()
                    work.scores(following)
                    s.arrive()
                    ds.take()
                    work.grad_k(this, i > 1)
                    q_free.arrive(stage=this)
                    this = following
                    if const_expr(work.dq_apart):
                        dq_free.take()
                    work.grad_q()
                    dq.arrive()
                if const_expr(not work.dq_apart):
                    dq_free.take()
                do.take()
                work.grad_p()
                dp.arrive()
                p.take()
                work.grad_v(i > 0)
                do_free.arrive()
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
    """Operands in shared memory, by what they are multiplied to."""

    s: tuple[InShared, InShared]
    dp: tuple[InShared, InShared]
    dv: InShared
    dk: InShared
    dq: tuple[InShared, InShared]


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
        self.dq_apart, self.kinds, self.operands, self.tmem = spec.dq_apart, kinds, operands, tmem

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
        a, b = _in_halves(self.tmem["p"]), self.operands.dv.at(0)
        issue(self.kinds["dv"], self.tmem["dv"], a, b, accumulate)

    @touches(
        lambda stage, accumulate: (
            reads("ds_t", 0), reads("ds_t", 1), reads("q", stage), writes("dk")
        ),
        unit="mma",
    )  # fmt: skip
    def grad_k(self, stage: Any, accumulate: Any) -> None:
        """dK (+)= dS^T Q."""
        a, b = _in_halves(self.tmem["ds_t"]), self.operands.dk.at(stage)
        issue(self.kinds["dk"], self.tmem["dk"], a, b, accumulate)

    @touches(
        lambda: (reads("ds", 0), reads("ds", 1), reads("k"), writes("dq", 0), writes("dq", 1)),
        unit="mma",
    )
    def grad_q(self) -> None:
        """dQ = dS K."""
        ds, k = self.operands.dq
        issue(self.kinds["dq"], self.tmem["dq"], ds.at(0), k.at(0), False)


def _in_halves(address: Any) -> Place:
    """A 16-bit operand in tensor memory, each half of its queries where float32 values were."""
    steps = HALF // 16
    starts = [HALF * (i // steps) + K_COLUMNS * (i % steps) for i in range(TILE // 16)]
    return Place(address, None, starts)
