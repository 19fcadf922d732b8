"""What each role's key-block loop costs, read out of machine code: one rule for every kernel.

A loop belongs to the role whose work it holds: matrix products are the MMA role's, TMA loads the
load role's, conversions (to P) on their way into tensor memory the softmax role's, other round
trips through tensor memory the correction role's. Of loops in loops the innermost that takes part
in the protocol counts, with the loops inside it that don't. What an iteration covers follows from
what it moves: 64 columns of P, or `d_v` of O, are a 128 x 128 tile; 2 announcements to a barrier,
one for K and one for V, are a key block, and so are the products of all query tiles.

Of the ways through an iteration (`fa4core.compile.flow`) the shortest is what an unmasked tile
costs, the longest what a masked one does; for the correction role, without and with rescaling. The
load role brings Q in some iterations of the loop only: its way is one that does no such thing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import attrs

from fa4core.compile.flow import Loop, Way, flow_of, is_arrival, is_step, is_wait
from fa4core.compile.sass import PIPES, Code, Instruction

TILE = 128
ROLES = ("softmax", "correction", "mma", "load")
P_COLUMNS = TILE // 2  # two 16-bit values a column


@attrs.frozen
class Shape:
    """What the problem says about a kernel's loops.

    Attributes:
        tiles: Query tiles of a CTA, side by side.
        d, d_v: Head dims, as multiples of an MMA's step.
    """

    tiles: int
    d: int
    d_v: int


@attrs.frozen
class Figures:
    """One way through a role's loop, for one softmax tile or one key block; see `per`.

    Attributes:
        role: Name of the role.
        way: "shortest" or "longest".
        per: "tile" (128 x 128 scores; softmax and correction) or "block" (all tiles of a CTA).
        address: Where the loop begins, bytes from the kernel's start.
        units: How many tiles or blocks one iteration covers; the figures are divided by it.
        pipes: Instructions of a warp by pipe.
        opcodes: Instructions of a warp by name with modifiers.
        waits: Barrier phases that it waits for, of mbarriers and named barriers.
        arrivals: Arrivals on barriers, commits included.
        smem_bytes: That a warp's loads and stores move in shared memory.
    """

    role: str
    way: str
    per: str
    address: int
    units: float
    pipes: dict[str, float]
    opcodes: dict[str, float]
    waits: float
    arrivals: float
    smem_bytes: float

    @property
    def instructions(self) -> float:
        return sum(self.pipes.values())

    def count(self, name: str) -> float:
        """Instructions whose name begins with `name`, e.g. "MUFU.EX2"."""
        return sum(n for opcode, n in self.opcodes.items() if opcode.startswith(name))


def figures_of(code: Code, shape: Shape) -> dict[tuple[str, str], Figures]:
    """By (role, "shortest" or "longest"): of all loops of a role, the one that costs least or most.

    A kernel may have loops of their own for masked and for unmasked tiles.
    """
    found: dict[tuple[str, str], Figures] = {}
    for loop in flow_of(code).innermost(lambda loop: _role(loop) is not None):
        role = _role(loop)
        assert role is not None
        for way, better in (("shortest", min), ("longest", max)):
            new = _figures(role, way, loop, shape)
            old = found.get((role, way), new)
            found[role, way] = better(old, new, key=lambda f: f.instructions)
    return found


def _role(loop: Loop) -> str | None:
    instructions = loop.instructions
    if not any(is_step(i) or is_wait(i) for i in instructions):
        return None
    opcodes = {i.opcode for i in instructions}
    if any(i.pipe == "tensor" for i in instructions):
        return "mma"
    if "UTMALDG" in opcodes:
        return "load"
    if "STTM" not in opcodes:
        return None
    if "F2FP" in opcodes:
        return "softmax"
    return "correction" if "LDTM" in opcodes else None


def _way(role: str, loop: Loop, longest: bool) -> Way:
    if role == "load":
        bare = loop.way(longest, _trips, fewest_steps=True)
        if _of(bare.all, "TMA"):
            return bare
    return loop.way(longest, _trips)


def _figures(role: str, way: str, loop: Loop, shape: Shape) -> Figures:
    taken = _way(role, loop, way == "longest")
    units = _units(role, loop, taken, shape)
    scale = 1 / units
    every = taken.all
    return Figures(
        role=role,
        way=way,
        per="tile" if role in ("softmax", "correction") else "block",
        address=loop.flow.blocks[loop.head][0].address,
        units=units,
        pipes={pipe: _of(every, pipe) * scale for pipe in PIPES},
        opcodes={name: n * scale for name, n in sorted(Counter(i.name for i in every).items())},
        waits=sum(is_wait(i) or _named(i, "SYNC") for i in every) * scale,
        arrivals=sum(is_arrival(i) or _named(i, "ARV") for i in every) * scale,
        smem_bytes=sum(32 * i.bytes for i in every if i.opcode in ("LDS", "STS")) * scale,
    )


def _of(instructions: Iterable[Instruction], pipe: str) -> int:
    return sum(i.pipe == pipe for i in instructions)


def _named(i: Instruction, what: str) -> bool:
    """Whether it waits for, or arrives on, a barrier with a number."""
    return i.opcode == "BAR" and what in i.modifiers


def _trips(loop: Loop) -> int:
    """How often a loop inside a tile's work runs: a row has 128 scores."""
    columns = _columns(loop.way(False).all, "LDTM")
    return max(1, TILE // columns) if columns else 1


def _units(role: str, loop: Loop, taken: Way, shape: Shape) -> float:
    """Tiles or key blocks that an iteration covers; at least one."""
    if role == "softmax":
        found = _columns(taken.own, "STTM") / P_COLUMNS
    elif role == "correction":
        found = _columns(loop.way(True).all, "LDTM") / shape.d_v
    elif role == "load":
        found = sum(i.opcode == "SYNCS" and is_arrival(i) for i in taken.all) / 2
    else:
        products = sum(i.pipe == "tensor" for i in taken.all)
        found = products / (shape.tiles * (shape.d // 16 + TILE // 16))
    return found or 1


def _columns(instructions: Iterable[Instruction], opcode: str) -> int:
    """Columns of tensor memory that a thread loads or stores."""
    widths = (re.search(r"\.x(\d+)", i.modifiers) for i in instructions if i.opcode == opcode)
    return sum(int(width[1]) if width else 1 for width in widths)
