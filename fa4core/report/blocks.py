"""What a CTA executes for one block of a backward kernel, counted.

The emulator's traces of two lengths, matched with the machine code (`fa4core.timing.small`), say
which instructions each warp issues; their difference is what the blocks between them cost. Where a
mask cuts blocks, both lengths have the same of those, so that the block is a FULL one. Repeated
waits are not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import attrs

from fa4core.compile.flow import is_arrival, is_wait
from fa4core.compile.sass import PIPES, Instruction
from fa4core.emulator.trace import MMA_FLAGS, Kind
from fa4core.plan.target import Rates
from fa4core.timing.replay import Program
from fa4core.timing.small import Small

SIZE = 2  # bytes of a 16-bit operand
ROLES = ("compute", "mma", "load", "reduce", "other")


@attrs.frozen
class Role:
    """What a warp of a role executes for a block; means over its warps.

    Attributes:
        warps: How many.
        pipes: Instructions by pipe.
        waits, arrivals: Barrier phases that it waits for, and arrivals; of mbarriers and barriers
            with a number.
    """

    warps: int
    pipes: dict[str, float]
    waits: float
    arrivals: float

    @property
    def instructions(self) -> float:
        return sum(self.pipes.values())


@attrs.frozen
class Moved:
    """Bytes of a CTA's shared memory for a block, by what moves them. The first four are what the
    paper counts.

    Attributes:
        a, b: Operands of products.
        stored: By warps: dS, and dQ on its way to global memory.
        added: Read by bulk copies that add them to dQ.
        read: By warps: LSE and delta; with two CTAs by copies to the other one, too. What all lanes
            read counts once.
        brought: Written by bulk copies: Q, dO, LSE, delta; with two CTAs also dS of the other one.
    """

    a: float = 0.0
    b: float = 0.0
    stored: float = 0.0
    added: float = 0.0
    read: float = 0.0
    brought: float = 0.0

    @property
    def counted_by_paper(self) -> float:
        return self.a + self.b + self.stored + self.added

    @property
    def all(self) -> float:
        return sum(attrs.astuple(self))


@attrs.frozen
class Block:
    """What a CTA does for a block.

    Attributes:
        roles: By name, out of `ROLES`.
        mac: Multiply-adds of its tensor core.
        smem: Bytes through shared memory.
        exponentials: Of the MUFU unit.
    """

    roles: dict[str, Role]
    mac: float
    smem: Moved
    exponentials: float

    @property
    def barrier_operations(self) -> float:
        """Waits and arrivals of all its warps."""
        return sum(r.warps * (r.waits + r.arrivals) for r in self.roles.values())

    def cycles(self, rates: Rates) -> dict[str, float]:
        """Of the units of the paper's table 3, as it counts them, and all of shared memory's."""
        return {
            "products": 2 * self.mac / rates.mma,
            "shared memory": self.smem.counted_by_paper / rates.smem_bytes,
            "exponentials": self.exponentials / rates.mufu,
            "shared memory, all": self.smem.all / rates.smem_bytes,
        }


def block_of(small: Small) -> Block:
    """From what two lengths execute."""
    few, many, _ = small.programs
    per_block = 1 / (small.blocks[1] - small.blocks[0])
    counts = {w: _counts(many, w) for w in _warps(many)}
    for warp, count in counts.items():
        count.subtract(_counts(few, warp))
    members: dict[str, list[Counter]] = {}
    for count in counts.values():
        members.setdefault(_role(count), []).append(count)
    whole: Counter = sum(counts.values(), Counter())
    moved = {f.name: whole["moved", f.name] * per_block for f in attrs.fields(Moved)}
    roles = {n: _mean(members[n], per_block) for n in ROLES if n in members}
    exponentials = 32 * whole["exponentials"] * per_block
    return Block(roles, whole["mac"] * per_block, Moved(**moved), exponentials)


def _warps(program: Program) -> list[int]:
    return [warp for cta, warp, _ in program.warps if cta == 0]


def _counts(program: Program, number: int) -> Counter:
    """Everything that one warp of the first CTA does."""
    found: Counter = Counter()
    code = program.graph.code.instructions
    for cta, warp, steps in program.warps:
        for step in steps if warp == number else ():
            i, events = code[step.index], step.events
            if i.opcode.startswith("U"):
                events = tuple(dict.fromkeys(e[2:] for e in events))
                events = tuple((0, 0, *e) for e in events)
            _count_events(found, events, cta == 0)
            if cta == 0:
                found["pipe", i.pipe] += 1
                found["waits"] += _is_wait(i, events)
                found["arrivals"] += _is_arrival(i, events)
                found["exponentials"] += i.name.startswith("MUFU.EX2")
    return found


def _is_wait(i: Instruction, events: tuple) -> bool:
    return bool(events) and (is_wait(i) or (i.opcode == "BAR" and "SYNC" in i.modifiers))


def _is_arrival(i: Instruction, events: tuple) -> bool:
    return bool(events) and (is_arrival(i) or (i.opcode == "BAR" and "ARV" in i.modifiers))


def _count_events(found: Counter, events: Iterable[tuple], own: bool) -> None:
    """Of the first CTA's memory and tensor core. A pair's products are issued by one CTA for both;
    a copy goes where it is sent to.

    Args:
        own: Whether a warp of the first CTA did it.
    """
    for _, _, kind, a, b, c, d, e in events:
        if kind == Kind.MMA and own:
            ctas = 2 if d & MMA_FLAGS["pair"] else 1
            rows, columns = a // ctas, b // ctas
            found["mac"] += rows * b * c
            found["moved", "a"] += 0 if d & MMA_FLAGS["a_elsewhere"] else rows * c * SIZE
            found["moved", "b"] += columns * c * SIZE
        elif kind == Kind.BULK_LOAD:
            if d == 0:
                found["moved", "brought"] += c
            if e and own:
                found["moved", "read"] += c
        elif kind == Kind.BULK_STORE and own:
            found["moved", "added"] += c
        elif kind == Kind.SHARED_READ and own:
            found["moved", "read"] += 128 * d
        elif kind == Kind.SHARED_WRITE and own:
            found["moved", "stored"] += 128 * d


def _role(count: Counter) -> str:
    """What a warp is for, by what it does for a block."""
    if count["pipe", "tensor"]:
        return "mma"
    if count["exponentials"]:
        return "compute"
    if count["pipe", "TMEM"]:
        return "reduce"
    return "load" if count["pipe", "TMA"] else "other"


def _mean(warps: list[Counter], per_block: float) -> Role:
    total: Counter = sum(warps, Counter())
    share = per_block / len(warps)
    pipes = {pipe: total["pipe", pipe] * share for pipe in PIPES}
    return Role(len(warps), pipes, total["waits"] * share, total["arrivals"] * share)
