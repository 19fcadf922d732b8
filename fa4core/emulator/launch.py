"""The values that go into and come out of the emulator.

Who uses it: the host side (``fa4core.emulator.session``), which builds a `Launch` from what the
DSL's own host code hands to the driver, and anyone who reads a `Report` or `Statistics`.
It knows nothing about kernels, about the DSL, or about how the native core works.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from fa4core.emulator.trace import Trace

Dim3 = tuple[int, int, int]

DETECTORS = frozenset({"uninitialised", "race", "bounds", "tmem", "barrier", "registers"})
"""What `Machine(detect=...)` can switch on. A deadlock is always reported: nothing can run on."""


@attrs.frozen
class Launch:
    """One kernel launch, as the driver would see it."""

    ptx: str  # text of the whole PTX module
    kernel: str  # entry name
    grid: Dim3
    block: Dim3
    cluster: Dim3 = (1, 1, 1)
    dynamic_smem: int = 0  # bytes
    params: tuple[bytes, ...] = ()  # raw bytes of each .param, in PTX order
    name: str = ""  # human name for reports


@attrs.frozen
class Allocation:
    """Device memory that kernels may touch; anything else is out of bounds."""

    address: int
    nbytes: int
    name: str = ""
    initialised: bool = True  # False: reading a byte before a kernel wrote it is reported


@attrs.frozen
class Report:
    """One finding of a detector, with the place where it was seen."""

    kind: str  # "deadlock", one of DETECTORS, or "instruction" (unknown or malformed)
    message: str
    kernel: str = ""
    cta: Dim3 | None = None
    warp: int | None = None
    ptx_line: int = 0  # 1-based line of the module's text; 0 if unknown
    ptx: str = ""  # the instruction
    source: str = ""  # "file:line" from .loc, "" if the PTX has none

    def __str__(self) -> str:
        where = f"CTA {self.cta} warp {self.warp}" if self.cta is not None else "launch"
        text = f"[{self.kind}] {self.message}\n    {self.kernel} {where}"
        if self.ptx_line:
            text += f", PTX line {self.ptx_line}: {self.ptx.strip()}"
        return text + (f"\n    at {self.source}" if self.source else "")


@attrs.frozen
class Event:
    """A stretch of time of one warp or unit; the unit of time is a scheduler step, not a cycle."""

    cta: int  # linear index in the grid
    lane: str  # "warp 3", "tma", "mma"
    kind: str  # "run", "wait", "mma", "load", "store"
    start: int
    stop: int
    ptx_line: int = 0


@attrs.frozen
class Statistics:
    """What a launch did. Counts are of warp-level instructions unless said otherwise."""

    name: str
    seconds: float
    seed: int
    instructions: Mapping[str, int]  # by kind of opcode, e.g. "fma.rn.f32x2"
    by_warp: Mapping[int, Mapping[str, int]]  # the same, by warp index within its CTA
    barrier_waits: Mapping[str, int]  # waits that had to block, by kind of barrier
    # e.g. "global.read", "shared.write", "tmem.read", "tma.load"; "tma.outside": of boxes that lie
    # outside their tensor altogether
    bytes: Mapping[str, int]
    mma: Mapping[str, int]  # e.g. "tcgen05.f16.cg1.m128n128k16 SS" -> count
    timeline: tuple[Event, ...] = ()
    trace: Trace | None = None


class EmulatorError(RuntimeError):
    """A detector fired, a kernel hung, or the PTX holds something the emulator does not know."""

    def __init__(self, reports: list[Report]):
        self.reports = reports
        shown = "\n".join(str(report) for report in reports[:10])
        more = f"\n({len(reports) - 10} more)" if len(reports) > 10 else ""
        super().__init__(f"{len(reports)} finding(s) in emulated kernel\n{shown}{more}")
