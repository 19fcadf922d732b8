"""Work sources: how a role learns which work tile comes next, and the role that asks for them.

Every role has an end of the source of its CTA and runs `first`, then `next` until it gets the
number of tiles or more; all of them get the same numbers in the same order. A static list needs no
communication. The queue is the grid itself, by cluster launch control (PTX,
`clusterlaunchcontrol.try_cancel`): a CTA for each tile is launched, those that run cancel others
that have not started and take their tiles, and the hardware hands them out in order of number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutlass import cute

from fa4core.forward.work import ANSWER_BYTES
from fa4core.lowering.cute import select
from fa4core.pipeline.effects import Fixed, reads, touches, writes
from fa4core.pipeline.endpoint import Ends, Poster, Waiter


class Stride(Fixed):
    """A list known at launch: `begin`, `begin + step`, ..."""

    def __init__(self, begin: Any, step: Any):
        self.begin, self.step = begin, step

    def first(self) -> Any:
        return self.begin

    def next(self, index: Any) -> Any:
        return index + self.step


class Answers(Fixed):
    """The ring of the queue's answers in shared memory.

    Attributes:
        place: 128 bits for each stage.
        count: Work tiles in all, which also says "nothing left".
        ctas: CTAs that share a work tile; all of them get the answer.
    """

    def __init__(self, place: cute.Pointer, count: Any, ctas: int = 1):
        self.place, self.count, self.ctas = place, count, ctas

    @touches(lambda stage, index: (reads("answers", stage),))
    def take(self, stage: Any, index: Any) -> Any:
        """The tile behind `index`, or `count`."""
        tile, _, _, valid = cute.arch.clc_response(self._at(stage))
        cute.arch.fence_proxy("async.shared", space="cta")  # read before it is written again
        return select(valid != 0, tile // self.ctas, self.count, "int")

    @touches(lambda stage, barrier: (writes("answers", stage),), unit="tma")
    def ask(self, stage: Any, barrier: Any) -> None:
        with cute.arch.elect_one():
            cute.arch.issue_clc_query(barrier, self._at(stage), multicast=self.ctas > 1)

    def _at(self, stage: Any) -> cute.Pointer:
        return self.place + stage


class Queue:
    """A role's end of the queue; what the answers say is up to `answers`."""

    def __init__(self, begin: Any, answers: Any, full: Waiter, free: Poster):
        self.begin, self.answers, self.full, self.free = begin, answers, full, free

    def first(self) -> Any:
        return self.begin

    def next(self, index: Any) -> Any:
        self.full.wait()
        found = self.answers.take(self.full.stage, index)
        self.free.arrive(stage=self.full.stage)
        self.full.advance()
        return found

    def __extract_mlir_values__(self) -> list:
        return self.full.__extract_mlir_values__()

    def __new_from_mlir_values__(self, values: list) -> Queue:
        full = self.full.__new_from_mlir_values__(values)
        return Queue(self.begin, self.answers, full, self.free)


def stride(begin: Any, step: Any) -> Callable[[Ends], Stride]:
    """The source of a CTA that works through `begin`, `begin + step`, ..."""
    return lambda ends: Stride(begin, step)


def queue(begin: Any, answers: Callable[[Ends], Any]) -> Callable[[Ends], Queue]:
    """The source of a CTA whose own tile is `begin`; `answers` makes a role's view of the ring."""
    return lambda ends: Queue(
        begin, answers(ends), ends.waits("tile_known"), ends.posts("tile_taken")
    )


@cute.jit
def scheduler(work: Any, plan: Any, ends: Ends):
    """One warp that asks for the tile behind each one, as soon as the ring has room for it."""
    known, taken = ends.posts("tile_known"), ends.waits("tile_taken")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        taken.wait()
        work.ask(known.stage, barrier=known.expect(ANSWER_BYTES))
        known.advance()
        taken.advance()
        index = source.next(index)
