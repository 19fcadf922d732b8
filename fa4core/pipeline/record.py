"""Records what role code does: runs a role function as plain Python and keeps its events.

The very function that emits the kernel runs here, with endpoints whose barriers write down waits
and arrivals, and with a stand-in for its work that writes down the declared effects. Feeds `check`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import attrs

from fa4core.pipeline.declare import WARP, How, Pipeline, Signal
from fa4core.pipeline.effects import Access, Unit
from fa4core.pipeline.endpoint import Ends

Slot = tuple[str, int]  # a signal's name and the number of its barrier


@attrs.frozen
class Wait:
    slot: Slot
    phase: int

    def __str__(self) -> str:
        return f"wait {self.slot[0]}[{self.slot[1]}] for phase {self.phase}"


@attrs.frozen
class Arrive:
    """`weight` arrivals; by the tensor core behind its queue if `unit` is "mma"."""

    slot: Slot
    weight: int
    unit: Unit = "threads"

    def __str__(self) -> str:
        verb = "commit to" if self.unit == "mma" else "arrive on"
        return f"{verb} {self.slot[0]}[{self.slot[1]}]"


@attrs.frozen
class Touch:
    """Accesses of one call; `slot` is what TMA reports to."""

    name: str
    accesses: tuple[Access, ...]
    unit: Unit
    slot: Slot | None = None

    def __str__(self) -> str:
        what = ", ".join(f"{a.kind} {a.region}[{a.stage}]" for a in self.accesses)
        return f"{self.name}: {what}"


@attrs.frozen
class Drain:
    """Waits until at most `left` groups of an asynchronous unit are left."""

    unit: Unit
    left: int

    def __str__(self) -> str:
        return f"wait for {self.unit} groups but {self.left}"


Event = Wait | Arrive | Touch | Drain


@attrs.frozen
class Program:
    """The events of one copy of a role, in order."""

    name: str
    events: tuple[Event, ...]


class Recorder:
    """Barriers that write down; see `endpoint.Barriers`."""

    integer = int

    def __init__(self, pipeline: Pipeline):
        self.pipeline = pipeline
        self.events: list[Event] = []

    def _slot(self, signal: Signal, copy: int, stage: int) -> Slot:
        number = copy * signal.stages + (0 if signal.stages == 1 else stage)
        if not 0 <= number < signal.barriers:
            raise ValueError(f"signal {signal.name!r} has no barrier for copy {copy}, {stage}")
        return signal.name, number

    def wait(self, signal: Signal, copy: int, stage: int, phase: int) -> None:
        self.events.append(Wait(self._slot(signal, copy, stage), phase))

    def arrive(self, signal: Signal, role: str, copy: int, stage: int, nbytes: int) -> Slot:
        slot, how = self._slot(signal, copy, stage), signal.how(role)
        warps = self.pipeline.role(role).warps
        if how is How.COMMIT:
            self.events.append(Arrive(slot, 1, "mma"))
        elif how is not How.TMA:  # TMA's arrival comes with its bytes
            self.events.append(Arrive(slot, warps if how is How.WARPS else warps * WARP))
        return slot


class _Anything:
    """A value that the protocol does not depend on."""

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __call__(self, *_: Any, **__: Any) -> _Anything:
        return self


class _Work:
    """Stands in for a role's work: methods with a declared effect record it."""

    def __init__(self, kind: type, recorder: Recorder, tiles: tuple[int, ...]):
        self._kind, self._recorder, self.tiles = kind, recorder, tiles

    def __getattr__(self, name: str) -> Any:
        effect = getattr(getattr(self._kind, name, None), "effect", None)
        if effect is None:
            return _Anything()

        def call(*args: Any, **kwargs: Any) -> _Anything:
            if effect.drains:
                self._recorder.events.append(Drain(effect.unit, *args))
                return _Anything()
            touched = effect.accesses(*args, **kwargs)
            slot = kwargs.get("barrier") if effect.unit == "tma" else None
            self._recorder.events.append(Touch(name, touched, effect.unit, slot))
            return _Anything()

        return call


def effects_of(work: type, ends: Ends) -> Any:
    """A stand-in for `work` that records where `ends` do: for what roles have besides their own."""
    assert isinstance(ends.barriers, Recorder)
    return _Work(work, ends.barriers, ())


def undecorated(function: Callable[..., Any]) -> FunctionType:
    """The function as it was written: plain Python, whatever has been compiled since.

    The DSL rewrites a decorated function's code in place when it first compiles it, and keeps the
    original beside it.
    """
    plain = getattr(function, "__wrapped__", function)
    code = getattr(plain, "_original_code", plain.__code__)
    copy = FunctionType(
        code, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__
    )
    copy.__kwdefaults__ = plain.__kwdefaults__
    return copy


def record(
    pipeline: Pipeline,
    role: str,
    function: Callable[..., Any],
    work: type,
    plan: Any,
    tiles: tuple[int, ...],
) -> list[Program]:
    """Run a role's function for each of its copies.

    Args:
        pipeline: The declaration.
        role: Name of the role.
        function: Its program, `function(work, plan, ends)` or, for a role with copies,
            `function(work, plan, ends, copy)`; decorated for the device or not.
        work: The class of its work, whose methods declare effects.
        plan: With Python integers.
        tiles: What `work.tiles` is.
    """
    plain = undecorated(function)
    programs = []
    per_copy = plain.__code__.co_argcount > 3
    for copy in range(pipeline.role(role).copies):
        recorder = Recorder(pipeline)
        extra = (copy,) if per_copy else ()
        plain(_Work(work, recorder, tiles), plan, Ends(pipeline, role, recorder), *extra)
        name = f"{role}{copy}" if per_copy else role
        programs.append(Program(name, tuple(recorder.events)))
    return programs
