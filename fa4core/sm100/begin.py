"""What roles begin with, and how all threads of a kernel meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import cute

from fa4core.forward.source import Answers, queue, stride
from fa4core.forward.work import Plan, Share
from fa4core.pipeline.effects import Fixed
from fa4core.pipeline.endpoint import Ends
from fa4core.sm100.memory import Memory


def meet_all(ctas: int) -> None:
    """All threads of the CTAs that share memory."""
    if ctas == 1:
        cute.arch.sync_threads()
    else:
        cute.arch.cluster_arrive(aligned=True)
        cute.arch.cluster_wait()


class Begin(Fixed):
    """What each role begins with, made anew in it: a value that all of them keep would be spilled.

    Attributes:
        memory, plan: Classes.
        items, runs: The plan's tables.
        cta: Rank of the CTA among those that share memory.
    """

    def __init__(
        self,
        spec: Any,
        memory: type[Memory],
        plan: type[Plan],
        items: cute.Tensor,
        runs: cute.Tensor,
        cta: Any,
    ):
        self.spec, self.memory, self.plan = spec, memory, plan
        self.items, self.runs, self.cta = items, runs, cta

    def __call__(self, role: str, work: Callable[[Any], Any]) -> tuple[Any, Plan, Ends]:
        """The arguments of a role's function."""
        memory, spec = self.memory(self.spec), self.spec
        share = Share(spec.tiles, self.cta, spec.ctas)
        plan = self.plan(self.items, self.runs, self._count, self._source(memory), share)
        return work(memory), plan, Ends(spec.pipeline, role, memory.barriers)

    def answers(self, memory: Memory) -> Answers:
        return Answers(memory.at("answers", cutlass.Int128), self._count, self.spec.ctas)

    @property
    def _count(self) -> Any:
        return cute.size(self.items, mode=[0])

    def _source(self, memory: Memory) -> Callable[[Ends], Any]:
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        first, step = first // self.spec.ctas, step // self.spec.ctas
        if self.spec.dynamic:
            return queue(first, lambda _: self.answers(memory))
        return stride(first, step)
