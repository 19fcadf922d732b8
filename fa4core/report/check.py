"""The standard that our forward kernel is held to, against a peer's for the same call."""

from __future__ import annotations

import attrs

from fa4core.report.kernel import Kernel

COMPILE_FACTOR = 1.2  # of the peer's time
SOFTMAX_PIPES = ("MUFU", "FMA", "ALU")  # units of the model that a softmax tile keeps busy


@attrs.frozen
class Line:
    """One requirement.

    Attributes:
        name: What is asked.
        ours: Figure of our kernel.
        limit: What it may be at most.
        unit: Of both.
    """

    name: str
    ours: float
    limit: float
    unit: str

    @property
    def ok(self) -> bool:
        return self.ours <= self.limit


def lines(ours: Kernel, plain: Kernel | None, peer: Kernel) -> list[Line]:
    """All requirements.

    Args:
        ours: The variant's kernel.
        plain: Ours for plain attention, if the variant is not that.
        peer: The peer's for the same call.
    """
    found = [
        Line("no spills", ours.spills, 0, "loads and stores of local memory"),
        Line("no stack", ours.stack + ours.local, 0, "bytes"),
        Line("registers at launch", ours.registers, peer.registers, "a thread"),
        _binding(ours, peer),
        Line(
            "barrier operations of the MMA warp",
            _operations(ours), _operations(peer), "a key block",
        ),
    ]  # fmt: skip
    if plain is not None:
        found += [
            Line(
                f"{role}: a FULL tile costs what plain attention's does",
                ours.figures[role, "shortest"].instructions,
                plain.figures[role, "shortest"].instructions,
                "instructions",
            )
            for role in ("softmax", "correction", "mma", "load")
        ]
    if ours.compile_seconds is not None and peer.compile_seconds is not None:
        limit = COMPILE_FACTOR * peer.compile_seconds
        found.append(Line("compile time", ours.compile_seconds, limit, "s, medians"))
    return found


def _binding(ours: Kernel, peer: Kernel) -> Line:
    """The pipe that our softmax tile keeps busy longest."""
    cycles = ours.cycles["unmasked"].units
    pipe = max(SOFTMAX_PIPES, key=lambda unit: cycles[unit] or 0.0)

    def count(kernel: Kernel) -> float:
        pipes = kernel.figures["softmax", "shortest"].pipes
        return pipes["FMA"] + 2 * pipes["FMA x2"] if pipe == "FMA" else pipes[pipe]

    return Line(f"binding pipe, {pipe}", count(ours), count(peer), "instructions a softmax tile")


def _operations(kernel: Kernel) -> float:
    mma = kernel.figures["mma", "shortest"]
    return mma.waits + mma.arrivals
