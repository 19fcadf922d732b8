"""The MMA role: one warp that issues all five matrix products to the tensor core."""

from __future__ import annotations

from typing import Any

from cutlass import const_expr, cute

from fa4core.pipeline.effects import Fixed, reads, touches, writes
from fa4core.pipeline.endpoint import Absent, Ends
from fa4core.pipeline.loop import range
from fa4core.sm100.backward.spec import Spec
from fa4core.sm100.backward.tiles import HALVES
from fa4core.sm100.umma import K_COLUMNS, InShared, Instruction, Place, issue


@cute.jit
def mma(work: Any, plan: Any, ends: Ends):
    """S, dP, dV of the first block; then S of each next block, dK and dQ of the one before it, and
    dP and dV of the next; at the end dK and dQ of the last. For a pair, dQ comes behind dP; with
    room for a single tile of Q, S comes behind dK and dQ."""
    k, k_columns = ends.waits("k_full"), ends.waits("k_columns_full", optional=True)
    q, q_columns = ends.waits("q_full"), ends.waits("q_columns_full", optional=True)
    do, do_columns = ends.waits("do_full"), ends.waits("do_columns_full", optional=True)
    v, v_free = ends.waits("v_full", optional=True), ends.posts("v_empty", optional=True)
    # operands are free behind the last product that reads them
    s_of_k, dq_of_k = _last_readers(work, ends, "k")
    s_of_q, dk_of_q = _last_readers(work, ends, "q")
    dp_of_do, dv_of_do = _last_readers(work, ends, "do")
    s, p = ends.posts("s_full"), ends.waits("p_ready")
    s_read = ends.waits("s_read", optional=True)
    dp, ds = ends.posts("dp_full", optional=True), ends.waits("ds_ready", optional=True)
    exchanged = ends.waits("ds_exchanged", optional=True)
    ds_free = ends.posts("ds_empty", optional=True)
    dq, dq_free = ends.posts("dq_full", optional=True), ends.waits("dq_empty", optional=True)
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
                    following = this
                    if const_expr(work.ahead):
                        following = q.take()
                        if const_expr(work.dq_inside == "scores"):  # noqa: SIM102 (when compiling)
                            if i > 1:
                                dq_free.take()
                        work.scores(following)
                        s.arrive()
                        s_of_q.arrive(stage=following)
                    if const_expr(work.with_k):
                        ds.take()
                        q_columns.take()
                        work.grad_k(this, i > 1)
                        dk_of_q.arrive(stage=this)
                    if const_expr(work.with_k and not work.pair):
                        if const_expr(work.dq_inside is None):
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
                    if const_expr(work.dq_inside == "grads"):
                        dq_free.take()
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
                if const_expr(work.with_v):
                    work.grad_v(i > 0)
                dv_of_do.arrive()
                if const_expr(not work.with_k):
                    dk_of_q.arrive(stage=this)
            s_of_k.arrive()
            if const_expr(work.with_k):
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


class MmaWork(Fixed):
    """The products of one block.

    Attributes:
        kinds: Instructions, by the name of the result.
        operands: In shared memory, by the name of the result; of what is computed.
        tmem: Address of each region of tensor memory, by name.
        pair: Whether two CTAs share the products.
        dq_inside, ahead, with_v, with_k: See `Spec`.
    """

    def __init__(
        self,
        spec: Spec,
        kinds: dict[str, Instruction],
        operands: dict[str, tuple[InShared, ...]],
        tmem: dict[str, Any],
    ):
        self.spec, self.kinds, self.operands, self.tmem = spec, kinds, operands, tmem
        self.pair, self.dq_inside, self.ahead = spec.pair, spec.dq_inside, spec.ahead
        self.with_v, self.with_k = spec.with_v, spec.with_k

    @touches(
        lambda stage: (reads("k"), reads("q", stage), writes("s", 0), writes("s", 1)), unit="mma"
    )
    def scores(self, stage: Any) -> None:
        """S^T = K Q^T."""
        k, q = self.operands["s"]
        issue(self.kinds["s"], self.tmem["s"], k.at(0), q.at(stage), False)

    @touches(lambda: (reads("v"), reads("do"), writes("dp", 0), writes("dp", 1)), unit="mma")
    def grad_p(self) -> None:
        """dP^T = V dO^T."""
        v, do = self.operands["dp"]
        issue(self.kinds["dp"], self.tmem["dp"], v.at(0), do.at(0), False)

    @touches(
        lambda accumulate: (reads("p", 0), reads("p", 1), reads("do_columns"), writes("dv")),
        unit="mma",
    )
    def grad_v(self, accumulate: Any) -> None:
        """dV (+)= P^T dO."""
        (do,) = self.operands["dv"]
        issue(self.kinds["dv"], self.tmem["dv"], self._halves("p"), do.at(0), accumulate)

    @touches(
        lambda stage, accumulate: (
            reads("ds_t", 0), reads("ds_t", 1), reads("q_columns", stage), writes("dk")
        ),
        unit="mma",
    )  # fmt: skip
    def grad_k(self, stage: Any, accumulate: Any) -> None:
        """dK (+)= dS^T Q."""
        (q,) = self.operands["dk"]
        issue(self.kinds["dk"], self.tmem["dk"], self._halves("ds_t"), q.at(stage), accumulate)

    @touches(
        lambda: (reads("ds", 0), reads("ds", 1), reads("k_columns"), writes("dq")),
        unit="mma",
    )
    def grad_q(self) -> None:
        """dQ = dS K, or groups of rows of dQ^T = K^T dS^T."""
        a, b = self.operands["dq"]
        for n in range(len(self.spec.dq_groups)):
            to = self.tmem["dq"] + n * self.spec.queries
            issue(self.kinds["dq"], to, a.at(n), b.at(0), False)

    def _halves(self, name: str) -> Place:
        """A 16-bit operand in tensor memory, each half of its queries where float32 values were."""
        stride, steps = self.spec.tmem[name].stride, self.spec.half // 16
        starts = [stride * (i // steps) + K_COLUMNS * (i % steps) for i in range(HALVES * steps)]
        return Place(self.tmem[name], None, starts)
