"""The consumer role: warpgroups that recompute S^T and dP^T and keep dK and dV.

Rows are keys, 64 for a warpgroup; the elements of a thread (`fragments`) run along queries. Each
warpgroup has a key tile of its own, or all work on one (`Shape.shared`): each then has a part of
the queries of S and dP, and a part of the head dim of dK and dV.
"""

from __future__ import annotations

from typing import Any

from cutlass import const_expr, cute

from fa4core.pipeline.endpoint import Ends


@cute.jit
def consumer(work: Any, plan: Any, ends: Ends, t: Any):
    """P and dS of the first query tile; then S of each next one with dQ and dK of that before it.

    Begun in order: S of the next tile, dQ and dK of this one, dP and dV of the next. During dK,
    threads pass dQ on and compute the next P: dP takes dQ's registers, which are read late. During
    dV they compute the next dS, exchanged during S or, where part of dV is `late`, before that.
    """
    kv, kv_free = ends.waits("kv_full"), ends.posts("kv_empty")
    q, q_free = ends.waits("q_full"), ends.posts("q_empty")
    out, out_free = ends.waits("grad_out_full"), ends.posts("grad_out_empty")
    p, p_full = ends.waits("p_full", optional=True), ends.posts("p_full", optional=True)
    grad_s, grad_s_full = ends.waits("grad_s_full"), ends.posts("grad_s_full")
    room = ends.waits("grad_q_empty", optional=True)
    grad_q_full = ends.posts("grad_q_full", optional=True)
    all_read, read = ends.waits("grad_s_read"), ends.posts("grad_s_read")
    all_stored, is_stored = ends.waits("grad_v_stored"), ends.posts("grad_v_stored")
    in_smem, tile = ends.declares("p_full"), t % len(work.tiles)
    apart, staged = ends.inside("grad_v", "grad_s"), ends.declares("grad_q_full")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        work.clear(t)
        kv.take()
        work.stored(0)  # results of the tile before
        is_stored.arrive()
        all_stored.take()
        if item.blocks > 0:
            begin = plan.run(item.first_run)
            q_stage = q.take()
            work.scores(t, q_stage)
            out_stage = out.take()
            work.grad_weights(t, out_stage)
            work.recall_lse(t, q_stage, True)
            work.settle(1)
            work.modify(t, item, begin, begin.first, plan.kind(begin, tile))
            work.recall_lse(t, q_stage, False)
            work.weigh(t)
            work.pass_on(t, p_full.stage, in_smem, 0)
            p_full.give()
            p.wait()
            work.add_v(t, p.stage, out_stage, in_smem, 0)
            p.advance()
            work.recall_delta(t, out_stage, True)
            work.settle(1)
            work.recall_delta(t, out_stage, False)
            work.grad_values(t)
            if const_expr(work.differentiates):
                work.scores(t, q_stage)
                work.settle(0)
                work.differentiate(t, item, begin, begin.first, plan.kind(begin, tile))
            if const_expr(work.late):
                work.share(t, grad_s_full.stage, False)
                grad_s_full.give()
                work.pass_on(t, p_full.stage, in_smem, 1)
                work.add_v(t, p.stage, out_stage, in_smem, 1)
            head, last, done, owed = begin.head, begin.first, 1, 0
            for r in range(item.first_run, item.end_run):
                run = plan.run(r)
                for j in range(run.first + done, run.end):
                    next_stage = q.take()
                    work.scores(t, next_stage)
                    if const_expr(not work.late):
                        work.share(t, grad_s_full.stage, False)
                        grad_s_full.give()
                    grad_s.wait()
                    work.grad_q(t, grad_s.stage, 0)
                    work.add_k(t, grad_s.stage, q_stage, False)
                    work.recall_lse(t, next_stage, True)
                    work.settle(1)
                    out_free.arrive(stage=out_stage)
                    if const_expr(staged):  # noqa: SIM102
                        if owed == 1:
                            room.take(t)
                    work.hand_over(t, item, head, last, 0, staged)
                    for part in work.passes[1:]:
                        work.show()
                        grad_q_full.arrive(t)
                        work.grad_q(t, grad_s.stage, part)
                        work.settle(0)
                        room.take(t)
                        work.hand_over(t, item, head, last, part, staged)
                    grad_s.advance()
                    work.modify(t, item, run, j, plan.kind(run, tile))
                    work.recall_lse(t, next_stage, False)
                    work.weigh(t)
                    work.show()
                    grad_q_full.arrive(t)
                    out_stage = out.take()
                    work.grad_weights(t, out_stage)
                    work.pass_on(t, p_full.stage, in_smem, 0)
                    p_full.give()
                    p.wait()
                    work.add_v(t, p.stage, out_stage, in_smem, 0)
                    p.advance()
                    work.recall_delta(t, out_stage, True)
                    work.settle(1)
                    q_free.arrive(stage=q_stage)
                    q_stage = next_stage
                    work.recall_delta(t, out_stage, False)
                    work.grad_values(t)
                    if const_expr(work.differentiates):
                        work.scores(t, q_stage)
                        work.settle(0)
                        work.differentiate(t, item, run, j, plan.kind(run, tile))
                    if const_expr(work.late):
                        work.share(t, grad_s_full.stage, False)
                        grad_s_full.give()
                        work.pass_on(t, p_full.stage, in_smem, 1)
                        work.add_v(t, p.stage, out_stage, in_smem, 1)
                    head, last, owed = run.head, j, 1
                done = 0
            if const_expr(not work.late):
                work.share(t, grad_s_full.stage, False)
                grad_s_full.give()
            grad_s.wait()
            for part in work.passes:
                work.grad_q(t, grad_s.stage, part)
                if const_expr(part == 0):
                    work.add_k(t, grad_s.stage, q_stage, False)
                    work.settle(1)
                    out_free.arrive(stage=out_stage)
                    if const_expr(staged):  # noqa: SIM102
                        if owed == 1:
                            room.take(t)
                else:
                    work.settle(0)
                    room.take(t)
                if const_expr(part == work.passes[-1]):
                    kv_free.arrive()
                work.hand_over(t, item, head, last, part, staged)
                work.show()
                grad_q_full.arrive(t)
            grad_s.advance()
            work.settle(0)
            q_free.arrive(stage=q_stage)
            read.arrive()
            all_read.take()
            room.take(t)
        else:
            kv_free.arrive()
        store(work, plan.item(index), t, apart)  # read again: to keep it would cost registers
        index = source.next(index)
    work.stored(0)


def store(work: Any, item: Any, t: Any, apart: bool) -> None:
    """dK and dV of a work tile; `apart`: not in the same memory."""
    work.finish_k(t)
    work.store(t, item, "k")
    if not apart:
        work.stored(0)
    work.finish_v(t)
    work.store(t, item, "v")
