"""Barriers on the device: endpoints' waits and arrivals as mbarrier and tcgen05 operations.

Imports the DSL; kernels use it. Barriers lie one after the other in shared memory, in the order in
which the pipeline declares its signals.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import tcgen05

from fa4core.pipeline.declare import WARP, How, Pipeline, Signal
from fa4core.pipeline.effects import Fixed

LEADER = 0  # rank of the cluster's first CTA


class Barriers(Fixed):
    """The mbarriers of a pipeline at `pointer` (shared memory, 8 bytes each)."""

    integer = cutlass.Int32

    def __init__(self, pipeline: Pipeline, pointer: cute.Pointer):
        self.pipeline, self.pointer = pipeline, pointer

    def initialise(self) -> None:
        """By one thread, before a fence and a barrier of all threads that use them."""
        for signal in self.pipeline.signals:
            if signal.named:
                continue
            count = self.pipeline.count(signal)
            for i in range(signal.barriers):
                cute.arch.mbarrier_init(self._at(signal, 0, i), count)

    def _at(self, signal: Signal, copy: Any, stage: Any) -> cute.Pointer:
        index = copy * signal.stages + stage
        return self.pointer + (self.pipeline.barrier(signal) + index)

    def _named(self, signal: Signal, copy: Any) -> dict[str, Any]:
        (waiter,) = signal.waiters
        threads = self.pipeline.count(signal) + self.pipeline.role(waiter).warps * WARP
        return {
            "barrier_id": self.pipeline.barrier(signal) + copy,
            "number_of_threads": threads,
        }

    def wait(self, signal: Signal, copy: Any, stage: Any, phase: Any) -> None:
        if signal.named:
            cute.arch.barrier(**self._named(signal, copy))
            return
        stage = 0 if signal.stages == 1 else stage
        cute.arch.mbarrier_wait(self._at(signal, copy, stage), phase)

    def arrive(self, signal: Signal, role: str, copy: Any, stage: Any, nbytes: int) -> Any:
        if signal.named:
            cute.arch.barrier_arrive(**self._named(signal, copy))
            return None
        stage = 0 if signal.stages == 1 else stage
        barrier = self._at(signal, copy, stage)
        how, ctas = signal.how(role), self._ctas(signal, role)
        if how is How.THREADS:
            _arrive(barrier, ctas)
        elif how is How.WARPS:
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                _arrive(barrier, ctas)
        elif how is How.COMMIT:
            with cute.arch.elect_one():
                self._commit(barrier, len(ctas))
        else:
            # the copies of a pair report to the first CTA's barrier by themselves
            with cute.arch.elect_one():
                for rank in ctas:
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, nbytes, rank)
        return barrier

    def _ctas(self, signal: Signal, role: str) -> tuple[Any, ...]:
        """Ranks of the CTAs to arrive at; None is this one."""
        reach = self.pipeline.reach(signal, role)
        if reach == "peer":
            return (cute.arch.block_idx_in_cluster() ^ 1,)
        reached: dict[str, tuple[int | None, ...]] = {
            "own": (None,),
            "leader": (LEADER,),
            "all": tuple(range(self.pipeline.ctas)),
        }
        return reached[reach]

    def _commit(self, barrier: cute.Pointer, reached: int) -> None:
        if self.pipeline.ctas == 1:
            tcgen05.commit(barrier)
        else:
            mask = (1 << reached) - 1
            tcgen05.commit(barrier, mask, tcgen05.CtaGroup.TWO)


def _arrive(barrier: cute.Pointer, ctas: tuple[Any, ...]) -> None:
    for rank in ctas:
        cute.arch.mbarrier_arrive(barrier, rank)


def in_role(pipeline: Pipeline, name: str, warp: Any) -> Any:
    """Whether `warp` belongs to a role."""
    role = pipeline.role(name)
    return (warp >= role.first) & (warp < role.end)


def copy_of(pipeline: Pipeline, name: str, warp: Any) -> Any:
    """Which of a role's copies `warp`, which belongs to it, is part of."""
    role = pipeline.role(name)
    return (warp - role.first) // role.warps if role.copies > 1 else cutlass.Int32(0)


def meet(pipeline: Pipeline, name: str, copy: Any) -> None:
    """A barrier of the threads of one copy of a role."""
    role = pipeline.role(name)
    cute.arch.barrier(
        barrier_id=pipeline.group_barrier(role, copy), number_of_threads=role.warps * WARP
    )


def thread_of(pipeline: Pipeline, name: str, thread: Any) -> Any:
    """A thread's number within its copy of the role."""
    role = pipeline.role(name)
    return (thread - role.first * WARP) % (role.warps * WARP)
