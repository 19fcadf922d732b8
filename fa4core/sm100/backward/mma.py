"""The MMA role: one warp that issues all five matrix products to the tensor core."""

from __future__ import annotations

from typing import Any

import attrs
from cutlass import const_expr, cute

from fa4core.pipeline.effects import Fixed, reads, touches, writes
from fa4core.pipeline.endpoint import Absent, Ends
from fa4core.pipeline.loop import range
from fa4core.sm100.backward.spec import HALF, TILE, Spec
from fa4core.sm100.umma import K_COLUMNS, InShared, Instruction, Place, issue


@cute.jit
def mma(work: Any, plan: Any, ends: Ends):
    """S, dP, dV of the first block; then S of each next block, dK and dQ of the one before it, and
    dP and dV of the next; at the end dK and dQ of the last. For a pair, dQ comes behind dP."""
    k, k_columns = ends.waits("k_full"), ends.waits("k_columns_full", optional=True)
    q, q_columns = ends.waits("q_full"), ends.waits("q_columns_full", optional=True)
    do, do_columns = ends.waits("do_full"), ends.waits("do_columns_full", optional=True)
    v, v_free = ends.waits("v_full"), ends.posts("v_empty")
    # operands are free behind the last product that reads them
    s_of_k, dq_of_k = _last_readers(work, ends, "k")
    s_of_q, dk_of_q = _last_readers(work, ends, "q")
    dp_of_do, dv_of_do = _last_readers(work, ends, "do")
    s, p = ends.posts("s_full"), ends.waits("p_ready")
    s_read = ends.waits("s_read", optional=True)
    dp, ds = ends.posts("dp_full"), ends.waits("ds_ready")
    exchanged = ends.waits("ds_exchanged", optional=True)
    ds_free = ends.posts("ds_empty", optional=True)
    dq, dq_free = ends.posts("dq_full"), ends.waits("dq_empty")
    grads = ends.posts("grads_full")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        if item.blocks > 0:
            k.take()
            this = q.take()
            if const_expr(work.dq_inside == "scores"):
                dq_free.take()
            work.scores(this)
            s.arrive()
            s_of_q.arrive(stage=this)
            v.take()
            for i in range(item.blocks, unroll=1):
                # the first round has no block before it, and nothing to add to
                if i > 0:
                    following = q.take()
                    if const_expr(work.dq_inside == "scores"):  # noqa: SIM102 (when compiling)
                        if i > 1:
                            dq_free.take()
                    work.scores(following)
                    s.arrive()
                    s_of_q.arrive(stage=following)
                    ds.take()
                    q_columns.take()
                    work.grad_k(this, i > 1)
                    dk_of_q.arrive(stage=this)
                    this = following
                    if const_expr(not work.pair):
                        if const_expr(work.dq_inside is None):
                            dq_free.take()
                        work.grad_q()
                        dq.arrive()
                if const_expr(work.dq_inside == "grads"):
                    dq_free.take()
                do.take()
                work.grad_p()
                dp.arrive()
                dp_of_do.arrive()
                s_read.take()
                if const_expr(work.pair):
                    if i > 0:
                        exchanged.take()
                        if const_expr(work.dq_inside is None):
                            dq_free.take()
                        work.grad_q()
                        dq.arrive()
                        ds_free.arrive()
                    else:
                        k_columns.take()
                p.take()
                do_columns.take()
                work.grad_v(i > 0)
                dv_of_do.arrive()
            s_of_k.arrive()
            v_free.arrive()
            ds.take()
            q_columns.take()
            work.grad_k(this, item.blocks > 1)
            dk_of_q.arrive(stage=this)
            exchanged.take()
            if const_expr(work.dq_inside is None):
                dq_free.take()
            if const_expr(work.dq_inside == "scores"):  # noqa: SIM102 (when compiling)
                if item.blocks > 1:
                    dq_free.take()
            work.grad_q()
            dq.arrive()
            ds_free.arrive()
            dq_of_k.arrive()
            grads.arrive()
        index = source.next(index)


def _last_readers(work: Any, ends: Ends, name: str) -> tuple[Any, Any]:
    """Who frees an operand of two products: the second of them, or each what it has of its own."""
    first = ends.posts(f"{name}_empty")
    return (first, ends.posts(f"{name}_columns_empty")) if work.pair else (Absent(), first)


@attrs.frozen(eq=False)
class Operands:
    """Operands in shared memory, by the product."""

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
        pair: Whether two CTAs share the products.
        dq_inside: See `Spec`.
    """

    def __init__(
        self, spec: Spec, kinds: dict[str, Instruction], operands: Operands, tmem: dict[str, Any]
    ):
        self.spec, self.kinds, self.operands, self.tmem = spec, kinds, operands, tmem
        self.pair, self.dq_inside = spec.pair, spec.dq_inside

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
        lambda accumulate: (reads("p", 0), reads("p", 1), reads("do_columns"), writes("dv")),
        unit="mma",
    )
    def grad_v(self, accumulate: Any) -> None:
        """dV (+)= P^T dO."""
        a, b = self._halves("p"), self.operands.dv.at(0)
        issue(self.kinds["dv"], self.tmem["dv"], a, b, accumulate)

    @touches(
        lambda stage, accumulate: (
            reads("ds_t", 0), reads("ds_t", 1), reads("q_columns", stage), writes("dk")
        ),
        unit="mma",
    )  # fmt: skip
    def grad_k(self, stage: Any, accumulate: Any) -> None:
        """dK (+)= dS^T Q."""
        a, b = self._halves("ds_t"), self.operands.dk.at(stage)
        issue(self.kinds["dk"], self.tmem["dk"], a, b, accumulate)

    @touches(
        lambda: (reads("ds", 0), reads("ds", 1), reads("k_columns"), writes("dq")),
        unit="mma",
    )
    def grad_q(self) -> None:
        """dQ = dS K."""
        ds, k = self.operands.dq
        issue(self.kinds["dq"], self.tmem["dq"], ds.at(0), k.at(0), False)

    def _halves(self, name: str) -> Place:
        """A 16-bit operand in tensor memory, each half of its queries where float32 values were."""
        stride, steps = self.spec.tmem[name].stride, HALF // 16
        starts = [stride * (i // steps) + K_COLUMNS * (i % steps) for i in range(TILE // 16)]
        return Place(self.tmem[name], None, starts)
