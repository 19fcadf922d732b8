"""The consumer role where dS stays in registers: each warpgroup has a key tile of its own.

dK then takes dS from registers as dV takes P, so that less is read from shared memory, which is
what the kernel waits for most: only dQ reads dS there. `consumer` is the role for all other shapes.
"""

from __future__ import annotations

from typing import Any

from cutlass import const_expr, cute

from fa4core.pipeline.endpoint import Ends
from fa4core.sm90.backward.consumer import store


@cute.jit
def consumer(work: Any, plan: Any, ends: Ends, t: Any):
    """Query tile by query tile: S and dP, then dV, dQ and dK.

    dK goes on while threads pass dQ on and until the next S is there, with the next dP begun behind
    it if there are registers for both. P and dS are rounded one after the other, dS first, because
    dV is only begun behind it: were P kept for dV meanwhile, ptxas would make products synchronous.
    """
    kv, kv_free = ends.waits("kv_full"), ends.posts("kv_empty")
    q, q_free = ends.waits("q_full"), ends.posts("q_empty")
    out, out_free = ends.waits("grad_out_full"), ends.posts("grad_out_empty")
    grad_s, grad_s_full = ends.waits("grad_s_full"), ends.posts("grad_s_full")
    room = ends.waits("grad_q_empty", optional=True)
    grad_q_full = ends.posts("grad_q_full", optional=True)
    all_read, read = ends.waits("grad_s_read"), ends.posts("grad_s_read")
    all_stored, is_stored = ends.waits("grad_v_stored"), ends.posts("grad_v_stored")
    tile = t % len(work.tiles)
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
            last_stage, owed = 0, 0
            for r in range(item.first_run, item.end_run):
                run = plan.run(r)
                for j in range(run.first, run.end):
                    q_stage = q.take()
                    work.scores(t, q_stage)
                    work.make_room(False)
                    out_stage = out.take()
                    work.grad_weights(t, out_stage)
                    work.settle(1)
                    if owed == 1:
                        q_free.arrive(stage=last_stage)
                    work.modify(t, item, run, j, plan.kind(run, tile))
                    work.recall_lse(t, q_stage, False)
                    work.weigh(t)
                    work.settle(0)
                    work.recall_delta(t, out_stage, False)
                    work.grad_values(t)
                    work.share(t, grad_s_full.stage, True)
                    grad_s_full.give()
                    work.pass_on(t, 0, False, 0)
                    work.add_v(t, 0, out_stage, False, 0)
                    grad_s.wait()
                    work.grad_q(t, grad_s.stage, 0)
                    grad_s.advance()
                    work.add_k(t, 0, q_stage, True)
                    work.settle(1)
                    out_free.arrive(stage=out_stage)
                    if const_expr(staged):  # noqa: SIM102
                        if owed == 1:
                            room.take(t)
                    work.hand_over(t, item, run.head, j, 0, staged)
                    work.show()
                    grad_q_full.arrive(t)
                    work.make_room(True)
                    last_stage, owed = q_stage, 1
            kv_free.arrive()
            work.settle(0)
            q_free.arrive(stage=last_stage)
            read.arrive()
            all_read.take()
            room.take(t)
        else:
            kv_free.arrive()
        store(work, plan.item(index), t, apart)  # read again: to keep it would cost registers
        index = source.next(index)
    work.stored(0)
