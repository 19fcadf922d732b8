"""Endpoints: a role's end of a signal, with its place in the ring.

The same object runs on the device, where its place is a pair of device integers carried through
loops by the DSL's value protocol, and in the checker, where it is a pair of Python integers. What a
wait or an arrival does is up to the `barriers` it was made with (`device.Barriers` emits mbarrier
operations, `check.Recorder` writes them down), so that role code is the only statement of the
protocol. It knows neither of them.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

from fa4core.pipeline.declare import Pipeline, Signal
from fa4core.pipeline.effects import Fixed


class Barriers(Protocol):
    """What endpoints need of a machine."""

    integer: Any  # makes an integer that can be carried through loops

    def wait(self, signal: Signal, copy: Any, stage: Any, phase: Any) -> None: ...

    def arrive(self, signal: Signal, role: str, copy: Any, stage: Any, nbytes: int) -> Any: ...


class _Ring:
    """A place in a ring of stages: index, and the parity of the rounds so far."""

    def __init__(self, signal: Signal, role: str, barriers: Barriers, place: tuple | None = None):
        self.signal, self.role, self.barriers = signal, role, barriers
        start = barriers.integer(0)
        self.stage, self.phase = (start, start) if place is None else place

    def advance(self) -> None:
        """Go to the next stage."""
        stages = self.signal.stages
        if stages == 1:
            self.phase = self.phase ^ 1
            return
        wrap = self.barriers.integer(self.stage + 1 == stages)
        self.stage = (self.stage + 1) * (1 - wrap)
        self.phase = self.phase ^ wrap

    def __extract_mlir_values__(self) -> list:
        return [v for n in (self.stage, self.phase) for v in n.__extract_mlir_values__()]

    def __new_from_mlir_values__(self, values: list) -> Self:
        stage = self.stage.__new_from_mlir_values__(values[:1])
        phase = self.phase.__new_from_mlir_values__(values[1:])
        return type(self)(self.signal, self.role, self.barriers, (stage, phase))


class Waiter(_Ring):
    """Waits for the phases of a signal one after the other."""

    def wait(self, copy: Any = 0) -> None:
        """Wait for the barrier of tile `copy` at this place."""
        phase = self.phase ^ 1 if self.signal.passed else self.phase
        self.barriers.wait(self.signal, copy, self.stage, phase)

    def take(self, copy: Any = 0) -> Any:
        """Wait, go on, and give the stage that was waited for."""
        stage = self.stage
        self.wait(copy)
        self.advance()
        return stage

    def drain(self, copies: tuple[int, ...] = (0,)) -> None:
        """Wait for all stages, so that no arrival is under way when the CTA ends."""
        for _ in range(self.signal.stages):
            for copy in copies:
                self.wait(copy)
            self.advance()


class Poster(_Ring):
    """Arrives on a signal, the way it declares for this role."""

    def arrive(self, copy: Any = 0, stage: Any = None) -> None:
        """Arrive at this place, or at a stage that was taken before."""
        at = self.stage if stage is None else stage
        self.barriers.arrive(self.signal, self.role, copy, at, 0)

    def give(self, copy: Any = 0) -> None:
        """Arrive at this place, and go on."""
        self.arrive(copy)
        self.advance()

    def expect(self, nbytes: int, copy: Any = 0) -> Any:
        """Arrive and announce bytes; gives the barrier that TMA reports to."""
        return self.barriers.arrive(self.signal, self.role, copy, self.stage, nbytes)


class Absent(Fixed):
    """An end of a signal that the pipeline does without."""

    stage = 0

    def wait(self, copy: Any = 0) -> None: ...

    def take(self, copy: Any = 0) -> Any:
        return self.stage

    def drain(self, copies: tuple[int, ...] = (0,)) -> None: ...

    def arrive(self, copy: Any = 0, stage: Any = None) -> None: ...

    def give(self, copy: Any = 0) -> None: ...

    def advance(self) -> None: ...


class Ends:
    """Makes a role's endpoints, refusing those it is not declared to have."""

    def __init__(self, pipeline: Pipeline, role: str, barriers: Barriers):
        self.pipeline, self.role, self.barriers = pipeline, role, barriers

    def _absent(self, name: str) -> bool:
        return all(signal.name != name for signal in self.pipeline.signals)

    def declares(self, name: str) -> bool:
        """Whether the pipeline has a signal of this name."""
        return not self._absent(name)

    def inside(self, name: str, host: str) -> bool:
        """Whether a region of shared memory lies in another one."""
        return any(r.name == name and r.inside == host for r in self.pipeline.smem)

    def waits(self, name: str, optional: bool = False) -> Any:
        """The end that waits; of an optional signal that is not declared, one that never does."""
        if optional and self._absent(name):
            return Absent()
        signal = self.pipeline.signal(name)
        if self.role not in signal.waiters:
            raise ValueError(
                f"role {self.role!r} waits for signal {name!r}, whose waiter is "
                f"{' and '.join(map(repr, signal.waiters))}"
            )
        return Waiter(signal, self.role, self.barriers)

    def posts(self, name: str, optional: bool = False) -> Any:
        """The end that arrives; see `waits`."""
        if optional and self._absent(name):
            return Absent()
        signal = self.pipeline.signal(name)
        signal.how(self.role)
        return Poster(signal, self.role, self.barriers)
