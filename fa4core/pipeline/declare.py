"""Roles, signals and regions: what a pipeline declares before any of it is compiled.

Arrival counts, barrier addresses, thread ranges and memory offsets all derive from these values, so
that role code holds none of them. Plain values; `layout` places them, `endpoint` uses them.

A pipeline may span the CTAs of a cluster: each has all roles, barriers and memory, but a role that
is `leader` runs in the first CTA only and works for all of them. Where arrivals go follows from
that. A signal that only leaders wait for collects the arrivals of all CTAs in the first one; where
others wait too, a leader arrives in all CTAs; anything else stays in its CTA, but for what a role
copies into the other CTA of a pair: it arrives there.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Literal

import attrs

WARP = 32

Reach = Literal["own", "leader", "all", "peer"]  # the CTAs on whose barriers a role arrives


class How(enum.Enum):
    """How a role arrives on a signal, which decides how many arrivals that makes."""

    TMA = "one arrival that announces bytes, which TMA then brings"
    COMMIT = "one arrival by the tensor core when all MMAs issued so far are done"
    WARPS = "one arrival by each warp of the role"
    THREADS = "one arrival by each thread of the role"
    COPY = "one arrival by each warp of the role that announces bytes, which it copies to the peer"


@attrs.frozen
class Role:
    """Warps that run one program.

    Attributes:
        name: Of the role.
        first: Its first warp.
        warps: How many warps one copy has.
        copies: Groups of warps that run the program side by side, each on a tile of its own.
        registers: For each thread, after reallocation; a multiple of 8.
        leader: Whether only the first CTA of a cluster runs the program, for all of them.
    """

    name: str
    first: int
    warps: int
    copies: int = 1
    registers: int = 128
    leader: bool = False

    @property
    def end(self) -> int:
        """The warp behind its last one."""
        return self.first + self.warps * self.copies


@attrs.frozen
class Signal:
    """An array of mbarriers: `copies` (one for each tile) of `stages` (a ring).

    Attributes:
        name: Of the signal.
        arrivals: Who arrives to complete a phase, and how. Several entries make a merged signal. Of
            a role with copies the one that the barrier belongs to arrives, or every one if the
            signal has a single copy.
        waiters: The role that waits, or a tuple of roles that each wait for every phase.
        stages: Length of the ring.
        copies: Tiles.
        passed: Whether the first wait passes at once ("empty" signals start that way).
        named: A hardware barrier of the CTA instead of an mbarrier in shared memory: quicker, one
            stage, all threads of the arriving and of the waiting role take part.
    """

    name: str
    arrivals: tuple[tuple[str, How], ...]
    waiters: tuple[str, ...] = attrs.field(converter=lambda w: (w,) if isinstance(w, str) else w)
    stages: int = 1
    copies: int = 1
    passed: bool = False
    named: bool = False

    def __attrs_post_init__(self) -> None:
        threads = all(how is How.THREADS for _, how in self.arrivals)
        if self.named and (self.stages > 1 or self.passed or not threads):
            raise ValueError(
                f"named signal {self.name!r}: one stage, arrivals by THREADS, and not passed"
            )

    @property
    def barriers(self) -> int:
        return self.stages * self.copies

    def how(self, role: str) -> How:
        """How `role` arrives.

        Raises:
            ValueError: It is not declared to.
        """
        for name, how in self.arrivals:
            if name == role:
                return how
        raise ValueError(
            f"role {role!r} arrives on signal {self.name!r}, which declares arrivals by "
            f"{[name for name, _ in self.arrivals]}; declare it there"
        )


@attrs.frozen
class Region:
    """Memory with a name: bytes of shared memory, or columns of tensor memory.

    Attributes:
        name: Of the region.
        size: Bytes, or columns of 128 lanes x 32 bits, of one stage.
        stages: How many of them.
        inside: A region that this one lies in, at `offset` of each stage: they alias on purpose.
        offset: See `inside`.
        stride: From stage to stage, where all of them lie in the only stage of `inside`.
        align: Of each stage, in the unit of `size`.
    """

    name: str
    size: int
    stages: int = 1
    inside: str | None = None
    offset: int = 0
    stride: int | None = None
    align: int = 1


@attrs.frozen
class Limits:
    """What the target has for one CTA."""

    smem_bytes: int = 232_448
    tmem_columns: int = 512
    registers: int = 65_536
    named_barriers: int = 16


class DoesNotFit(ValueError):
    """The declaration asks for more than the target has; the message says of what."""


@attrs.frozen
class Pipeline:
    """A whole declaration: roles, signals and memory.

    Attributes:
        roles, signals: Of each CTA.
        smem, tmem: Memory of each CTA.
        rmem: Registers of each CTA that asynchronous instructions read or write.
        ctas: CTAs of the cluster that it spans.
        limits: Of each CTA.

    Raises:
        DoesNotFit: Registers or barriers that cannot be.
        ValueError: The declaration contradicts itself.
    """

    roles: tuple[Role, ...]
    signals: tuple[Signal, ...]
    smem: tuple[Region, ...] = ()
    tmem: tuple[Region, ...] = ()
    rmem: tuple[Region, ...] = ()
    limits: Limits = Limits()
    ctas: int = 1

    def __attrs_post_init__(self) -> None:
        warp = 0
        for role in self.roles:
            if role.first != warp:
                raise ValueError(f"role {role.name!r} starts at warp {role.first}, not at {warp}")
            if role.registers % 8 or not 24 <= role.registers <= 256:
                raise DoesNotFit(f"role {role.name!r}: {role.registers} registers; 24, 32 .. 256")
            warp = role.end
        total = sum(r.registers * (r.end - r.first) * WARP for r in self.roles)
        if total > self.limits.registers:
            raise DoesNotFit(
                f"registers: {total} for the roles {[r.name for r in self.roles]}; "
                f"{self.limits.registers} exist"
            )
        if self.group_barrier(self.roles[-1], self.roles[-1].copies) > self.limits.named_barriers:
            raise DoesNotFit(f"more than {self.limits.named_barriers} named barriers")
        for signal in self.signals:
            for name in (*(name for name, _ in signal.arrivals), *signal.waiters):
                if signal.copies > 1 and self.role(name).copies not in (1, signal.copies):
                    raise ValueError(
                        f"signal {signal.name!r} has {signal.copies} copies, role {name!r} "
                        f"{self.role(name).copies}"
                    )

    def role(self, name: str) -> Role:
        return _find(self.roles, name)

    def signal(self, name: str) -> Signal:
        return _find(self.signals, name)

    @property
    def threads(self) -> int:
        return self.roles[-1].end * WARP

    def count(self, signal: Signal) -> int:
        """Arrivals that complete a phase of the signal's barriers."""
        per = {
            How.TMA: lambda role: 1,
            How.COMMIT: lambda role: 1,
            How.WARPS: lambda role: role.warps,
            How.THREADS: lambda role: role.warps * WARP,
            How.COPY: lambda role: role.warps,
        }
        everyone = signal.copies == 1
        return sum(
            per[how](self.role(name))
            * (self.role(name).copies if everyone else 1)
            * (self.ctas if self.reach(signal, name) == "leader" else 1)
            for name, how in signal.arrivals
        )

    def reach(self, signal: Signal, role: str) -> Reach:
        """On whose barriers `role` arrives; see the module."""
        if signal.how(role) is How.COPY:
            return "peer"
        to_leader = all(self.role(waiter).leader for waiter in signal.waiters)
        if self.ctas == 1 or self.role(role).leader == to_leader:
            return "own"
        return "leader" if to_leader else "all"

    def barrier(self, signal: Signal) -> int:
        """Index of the signal's first barrier among the pipeline's of the same sort.

        Named barriers are counted from 1: number 0 is that of the whole CTA.
        """
        before = self.signals[: self.signals.index(signal)]
        return sum(s.barriers for s in before if s.named == signal.named) + signal.named

    @property
    def barriers(self) -> int:
        """How many mbarriers there are."""
        return sum(s.barriers for s in self.signals if not s.named)

    def group_barrier(self, role: Role, copy: Any = 0) -> Any:
        """Number of the named barrier at which the threads of one copy of a role meet."""
        named = 1 + sum(s.barriers for s in self.signals if s.named)
        return named + sum(r.copies for r in self.roles[: self.roles.index(role)]) + copy


def _find(among: Iterable, name: str):
    for item in among:
        if item.name == name:
            return item
    raise ValueError(f"{name!r} is not declared; known: {[i.name for i in among]}")
