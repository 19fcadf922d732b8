"""Checks a pipeline's protocol for one list of work: deadlock, missed phases, races.

Roles never choose which barrier to wait on, so whether they can all finish does not depend on the
order in which they run: one simulation decides. Each access carries the set of accesses and waits
that happen before it (as bits of an integer), through program order, barrier phases, and the
tensor core's order of issue. Two accesses of overlapping memory, one of them a write, must be
ordered. A phase of a barrier must not complete before the waiter has seen the one before it, or it
would be missed. A phase to which the tensor core or TMA arrives must be waited for, or that might
happen when the CTA has ended; threads arrive before the barrier behind all roles. Plain Python;
knows no kernel.
"""

from __future__ import annotations

import attrs

from fa4core.pipeline.declare import How, Pipeline, Signal
from fa4core.pipeline.effects import Access
from fa4core.pipeline.layout import Placed, place
from fa4core.pipeline.record import Arrive, Drain, Program, Slot, Touch, Wait


class ProtocolError(AssertionError):
    """The pipeline is wrong; the message is the counterexample."""


@attrs.define
class _Barrier:
    signal: Signal
    count: int
    arrived: int = 0
    known: int = 0  # what happens before the phase that is being completed
    phases: list[int] = attrs.field(factory=list)  # the same of every completed one
    # bits and places of the waits seen, by the program that waited
    waits: dict[str, list[tuple[int, str]]] = attrs.field(factory=dict)

    def arrive(self, weight: int, known: int, where: str) -> None:
        self.arrived += weight
        self.known |= known
        if self.arrived > self.count:
            raise ProtocolError(
                f"{where}: {self.arrived} arrivals in a phase of {self.signal.name}, which "
                f"{self.count} complete"
            )
        if self.arrived == self.count:
            self.phases.append(self.known)
            self.arrived = self.known = 0


@attrs.define
class _Process:
    program: Program
    position: int = 0
    known: int = 0
    queue: int = 0  # what the tensor core knows behind the last MMA of this role
    waited: dict[Slot, int] = attrs.field(factory=dict)
    groups: dict[str, list[int]] = attrs.field(factory=dict)  # not drained, by asynchronous unit

    @property
    def done(self) -> bool:
        return self.position == len(self.program.events)

    def where(self) -> str:
        event = self.program.events[self.position]
        return f"{self.program.name}, event {self.position} ({event})"


@attrs.frozen
class _Seen:
    bit: int
    write: bool
    begin: int
    end: int
    where: str


class _Simulation:
    def __init__(self, pipeline: Pipeline, programs: list[Program]):
        self.processes = [_Process(p) for p in programs]
        self.barriers = {
            (signal.name, i, cta): _Barrier(signal, pipeline.count(signal))
            for signal in pipeline.signals
            for i in range(signal.barriers)
            for cta in range(pipeline.ctas)
        }
        limits = pipeline.limits
        self.spaces = (
            place(pipeline.smem, limits.smem_bytes, "bytes"),
            place(pipeline.tmem, limits.tmem_columns, "columns"),
            place(pipeline.rmem, limits.registers, "registers"),
        )
        self.seen: dict[tuple[int, int], list[_Seen]] = {
            (cta, space): [] for cta in range(pipeline.ctas) for space in range(len(self.spaces))
        }
        self.bits = 0

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for process in self.processes:
                while not process.done and self.step(process):
                    process.position += 1
                    moved = True
        stuck = [p.where() for p in self.processes if not p.done]
        if stuck:
            raise ProtocolError("deadlock:\n  " + "\n  ".join(stuck))
        for p in self.processes:
            for unit, groups in p.groups.items():
                if groups:
                    raise ProtocolError(
                        f"{p.program.name} ends before {len(groups)} groups of {unit} do"
                    )
        self.missed_phases()
        self.late_phases()

    def step(self, process: _Process) -> bool:
        event = process.program.events[process.position]
        if isinstance(event, Wait):
            return self.wait(process, event)
        if isinstance(event, Arrive):
            known = process.known
            if event.unit == "mma":
                known = process.queue = process.queue | known
            self.barriers[event.slot].arrive(event.weight, known, process.where())
            return True
        if isinstance(event, Drain):
            groups = process.groups.get(event.unit, [])
            while len(groups) > event.left:
                process.known |= groups.pop(0)
            return True
        self.touch(process, event)
        return True

    def wait(self, process: _Process, event: Wait) -> bool:
        barrier = self.barriers[event.slot]
        number = process.waited.get(event.slot, 0) - barrier.signal.passed
        if number >= len(barrier.phases):
            return False
        if event.phase != number % 2:
            raise ProtocolError(f"{process.where()}: phase {number} has parity {number % 2}")
        process.waited[event.slot] = process.waited.get(event.slot, 0) + 1
        if number >= 0:
            process.known |= barrier.phases[number]
        bit = self.new_bit()
        process.known |= bit
        barrier.waits.setdefault(process.program.name, []).append((bit, process.where()))
        return True

    def touch(self, process: _Process, event: Touch) -> None:
        before = process.known | (process.queue if event.unit == "mma" else 0)
        if event.unit == "wgmma":  # in the order of issue, as far as accumulators are concerned
            before |= sum(process.groups.get("wgmma", ()))
        bit = self.new_bit()
        for access in event.accesses:
            for cta in event.ctas:
                self.access(access, cta ^ access.peer, before, bit, process.where())
        if event.unit == "mma":
            process.queue = before | bit
        elif event.unit == "threads":
            process.known |= bit
        elif event.unit in ("wgmma", "store"):
            process.groups.setdefault(event.unit, []).append(bit)
        else:
            for slot in event.slots:
                self.barriers[slot].arrive(1, before | bit, process.where())

    def access(self, access: Access, cta: int, before: int, bit: int, where: str) -> None:
        index = next((i for i, s in enumerate(self.spaces) if access.region in s), None)
        if index is None:
            raise ProtocolError(f"{where}: region {access.region!r} is not declared")
        region: Placed = self.spaces[index][access.region]
        if not 0 <= access.stage < region.region.stages:
            raise ProtocolError(f"{where}: {access.region} has no stage {access.stage}")
        begin = region.at(access.stage)
        end, write = begin + region.region.size, access.kind == "write"
        kept, seen = [], self.seen[cta, index]
        for other in seen:
            apart = other.end <= begin or end <= other.begin
            if not apart and (write or other.write) and not (other.bit & (before | bit)):
                raise ProtocolError(f"race:\n  {where}\n  {other.where}\n  are not ordered")
            covered = write and begin <= other.begin and other.end <= end
            if apart or not covered:
                kept.append(other)
        seen[:] = [*kept, _Seen(bit, write, begin, end, where)]

    def new_bit(self) -> int:
        self.bits += 1
        return 1 << self.bits

    def missed_phases(self) -> None:
        for barrier in self.barriers.values():
            for waits in barrier.waits.values():
                for number, (bit, where) in enumerate(waits, start=-barrier.signal.passed):
                    after = number + 1
                    if after < len(barrier.phases) and not barrier.phases[after] & bit:
                        raise ProtocolError(
                            f"{where}: phase {after} may complete before phase {number} is seen"
                        )

    def late_phases(self) -> None:
        for (name, number, cta), barrier in self.barriers.items():
            late = any(how in (How.COMMIT, How.TMA, How.COPY) for _, how in barrier.signal.arrivals)
            waits = max((len(w) for w in barrier.waits.values()), default=0)
            seen = max(0, waits - barrier.signal.passed)
            if late and (barrier.arrived or len(barrier.phases) > seen):
                raise ProtocolError(
                    f"{name}[{number}] in CTA {cta}: {' and '.join(barrier.signal.waiters)} ended "
                    f"before phase {seen}, which may complete when the CTA has ended, too"
                )


def check(pipeline: Pipeline, programs: list[Program]) -> None:
    """Check the programs of all roles for one list of work.

    Raises:
        ProtocolError: With the roles and events of the counterexample.
    """
    _Simulation(pipeline, programs).run()
