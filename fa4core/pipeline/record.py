"""Records what role code does: runs a role function as plain Python and keeps its events.

The very function that emits the kernel runs here, with endpoints whose barriers write down waits
and arrivals, and with a stand-in for its work that writes down the declared effects. Feeds `check`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import attrs

from fa4core.pipeline.declare import WARP, How, Pipeline, Signal
from fa4core.pipeline.effects import Access, Unit
from fa4core.pipeline.endpoint import Ends

Slot = tuple[str, int, int]  # a signal's name, the number of its barrier, and the CTA


def _shown(slot: Slot) -> str:
    return f"{slot[0]}[{slot[1]}]{_of(slot[2])}"


def _of(cta: int) -> str:
    return f" of CTA {cta}" if cta else ""


@attrs.frozen
class Wait:
    slot: Slot
    phase: int

    def __str__(self) -> str:
        return f"wait {_shown(self.slot)} for phase {self.phase}"


@attrs.frozen
class Arrive:
    """`weight` arrivals; by the tensor core behind its queue if `unit` is "mma"."""

    slot: Slot
    weight: int
    unit: Unit = "threads"

    def __str__(self) -> str:
        verb = "commit to" if self.unit == "mma" else "arrive on"
        return f"{verb} {_shown(self.slot)}"


@attrs.frozen
class Touch:
    """Accesses of one call in the memory of `ctas`; `slots` are what TMA reports to."""

    name: str
    accesses: tuple[Access, ...]
    unit: Unit
    ctas: tuple[int, ...]
    slots: tuple[Slot, ...] = ()

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
    """Barriers of one CTA that write down; see `endpoint.Barriers`."""

    integer = int

    def __init__(self, pipeline: Pipeline, cta: int):
        self.pipeline, self.cta = pipeline, cta
        self.events: list[Event] = []

    def _slot(self, signal: Signal, copy: int, stage: int, cta: int) -> Slot:
        number = copy * signal.stages + (0 if signal.stages == 1 else stage)
        if not 0 <= number < signal.barriers:
            raise ValueError(f"signal {signal.name!r} has no barrier for copy {copy}, {stage}")
        return signal.name, number, cta

    def wait(self, signal: Signal, copy: int, stage: int, phase: int) -> None:
        self.events.append(Wait(self._slot(signal, copy, stage, self.cta), phase))

    def arrive(
        self, signal: Signal, role: str, copy: int, stage: int, nbytes: int
    ) -> tuple[Slot, ...]:
        how, warps = signal.how(role), self.pipeline.role(role).warps
        slots = tuple(self._slot(signal, copy, stage, to) for to in self._reached(signal, role))
        for slot in slots:
            if how is How.COMMIT:
                self.events.append(Arrive(slot, 1, "mma"))
            elif how not in (How.TMA, How.COPY):  # whose arrivals come with their bytes
                self.events.append(Arrive(slot, warps if how is How.WARPS else warps * WARP))
        return slots * warps if how is How.COPY else slots  # each warp copies its own share

    def _reached(self, signal: Signal, role: str) -> tuple[int, ...]:
        every = tuple(range(self.pipeline.ctas))
        reached = {"own": (self.cta,), "leader": every[:1], "all": every, "peer": (self.cta ^ 1,)}
        return reached[self.pipeline.reach(signal, role)]


class _Anything:
    """A value that the protocol does not depend on."""

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __call__(self, *_: Any, **__: Any) -> _Anything:
        return self


class _Work:
    """Stands in for a role's work: methods with a declared effect record it."""

    def __init__(
        self, kind: type, recorder: Recorder, known: Mapping[str, Any], leader: bool = False
    ):
        self._kind, self._recorder, self._leader = kind, recorder, leader
        self.__dict__.update(known)

    def _ctas(self, unit: Unit) -> tuple[int, ...]:
        """Whose memory is accessed: a leader's asynchronous work is in that of all CTAs."""
        if unit != "threads" and self._leader:
            return tuple(range(self._recorder.pipeline.ctas))
        return (self._recorder.cta,)

    def __getattr__(self, name: str) -> Any:
        effect = getattr(getattr(self._kind, name, None), "effect", None)
        if effect is None:
            return _Anything()

        def call(*args: Any, **kwargs: Any) -> _Anything:
            if effect.drains:
                self._recorder.events.append(Drain(effect.unit, *args))
                return _Anything()
            touched = effect.accesses(*args, **kwargs)
            slots = kwargs["barrier"] if effect.unit == "tma" else ()
            ctas = self._ctas(effect.unit)
            self._recorder.events.append(Touch(name, touched, effect.unit, ctas, slots))
            return _Anything()

        return call


def effects_of(work: type, ends: Ends) -> Any:
    """A stand-in for `work` that records where `ends` do: for what roles have besides their own."""
    assert isinstance(ends.barriers, Recorder)
    return _Work(work, ends.barriers, {})


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
    known: Mapping[str, Any],
) -> list[Program]:
    """Run a role's function for each of its copies in each CTA that has it.

    Args:
        pipeline: The declaration.
        role: Name of the role.
        function: Its program, `function(work, plan, ends)` or, for a role with copies,
            `function(work, plan, ends, copy)`; decorated for the device or not.
        work: The class of its work, whose methods declare effects.
        plan: With Python integers.
        known: Attributes of the work that the role goes by, such as how many tiles there are,
            besides `cta`.
    """
    plain, declared = undecorated(function), pipeline.role(role)
    programs = []
    per_copy = plain.__code__.co_argcount > 3
    for cta in range(1 if declared.leader else pipeline.ctas):
        for copy in range(declared.copies):
            recorder = Recorder(pipeline, cta)
            extra = (copy,) if per_copy else ()
            stand_in = _Work(work, recorder, {**known, "cta": cta}, declared.leader)
            plain(stand_in, plan, Ends(pipeline, role, recorder), *extra)
            name = f"{role}{copy}" if per_copy else role
            programs.append(Program(name + _of(cta), tuple(recorder.events)))
    return programs
