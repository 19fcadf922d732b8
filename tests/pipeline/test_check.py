"""The checker on small pipelines written for it: each kind of mistake, and right ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fa4core.pipeline.check import ProtocolError, check
from fa4core.pipeline.declare import How, Pipeline, Region, Role, Signal
from fa4core.pipeline.effects import reads, touches, writes
from fa4core.pipeline.record import record

STAGES = 2
PIPELINE = Pipeline(
    (Role("producer", 0, 1), Role("consumer", 1, 1)),
    (
        Signal("full", (("producer", How.WARPS),), "consumer", stages=STAGES),
        Signal("empty", (("consumer", How.WARPS),), "producer", stages=STAGES, passed=True),
    ),
    smem=(Region("buffer", 64, stages=STAGES),),
)


class Work:
    @touches(lambda stage: (writes("buffer", stage),))
    def fill(self, stage): ...

    @touches(lambda stage: (reads("buffer", stage),))
    def use(self, stage): ...


def producer(work, plan, ends):
    full, empty = ends.posts("full"), ends.waits("empty")
    for _ in range(plan.count):
        empty.wait()
        work.fill(full.stage)
        full.arrive()
        full.advance()
        empty.advance()


def consumer(work, plan, ends):
    full, empty = ends.waits("full"), ends.posts("empty")
    for _ in range(plan.count):
        full.wait()
        work.use(full.stage)
        empty.arrive()
        full.advance()
        empty.advance()


def run(produce=producer, consume=consumer, count: int = 5, pipeline: Pipeline = PIPELINE) -> None:
    plan = SimpleNamespace(count=count)
    check(
        pipeline,
        record(pipeline, "producer", produce, Work, plan, {})
        + record(pipeline, "consumer", consume, Work, plan, {}),
    )


@pytest.mark.parametrize("count", range(7))
def test_a_right_protocol_passes(count: int) -> None:
    run(count=count)


def test_use_after_release_is_a_race() -> None:
    def consume(work, plan, ends):
        full, empty = ends.waits("full"), ends.posts("empty")
        for _ in range(plan.count):
            full.wait()
            empty.arrive()
            work.use(full.stage)
            full.advance()
            empty.advance()

    with pytest.raises(ProtocolError, match="race") as found:
        run(consume=consume)
    assert "producer" in str(found.value) and "consumer" in str(found.value)


def test_a_missing_wait_is_a_race() -> None:
    def produce(work, plan, ends):
        full = ends.posts("full")
        for _ in range(plan.count):
            work.fill(full.stage)
            full.arrive()
            full.advance()

    with pytest.raises(ProtocolError):
        run(produce=produce)


def test_disagreeing_trip_counts_are_a_deadlock() -> None:
    def consume(work, plan, ends):
        consumer(work, SimpleNamespace(count=plan.count + 1), ends)

    with pytest.raises(ProtocolError, match=r"deadlock(.|\n)*consumer(.|\n)*full"):
        run(consume=consume)


def test_too_many_arrivals_are_seen() -> None:
    full = Signal("full", (("producer", How.WARPS), ("consumer", How.WARPS)), "consumer")
    pipeline = Pipeline((Role("producer", 0, 2), Role("consumer", 2, 1)), (full,))

    def produce(work, plan, ends):
        full = ends.posts("full")
        full.arrive()  # two warps of three arrivals
        full.arrive()

    with pytest.raises(ProtocolError, match="4 arrivals"):
        run(produce, lambda *_: None, pipeline=pipeline)


def test_an_unseen_phase_is_found() -> None:
    """Nothing keeps the producer from completing a phase before the waiter saw the last one."""

    def produce(work, plan, ends):
        full = ends.posts("full")
        for _ in range(plan.count):
            full.arrive()
            full.advance()

    def consume(work, plan, ends):
        full = ends.waits("full")
        for _ in range(plan.count):
            full.wait()
            full.advance()

    with pytest.raises(ProtocolError, match="may complete before"):
        run(produce, consume)


def test_endpoints_belong_to_roles() -> None:
    def consume(work, plan, ends):
        ends.posts("full")

    with pytest.raises(ValueError, match="declares arrivals by"):
        run(consume=consume)


def test_undeclared_regions_and_stages_are_named() -> None:
    def produce(work, plan, ends):
        work.fill(STAGES)

    with pytest.raises(ProtocolError, match="no stage 2"):
        run(produce=produce, consume=lambda *_: None)
