"""What the warps of each role did with their cycles.

Warps side by side that share their code are a role; what it is for, its instructions say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs

from fa4core.timing.match import Step
from fa4core.timing.parameters import UNITS
from fa4core.timing.replay import REASONS, Program, Replayed

_ALIKE = 0.5  # share of their instructions that two warps of a role have in common
_WORTH = 0.02  # of a warp's cycles, to be listed


@attrs.frozen
class Role:
    """Modelled; cycles are shares of those from a warp's start to its end, means over seeds.

    Attributes:
        warps: Numbers in a CTA.
        does: What its instructions are for.
        instructions: Of a warp.
        spent: Shares by `fa4core.timing.replay.REASONS`.
        barriers: (offset in shared memory, share): mbarriers that it waits at, longest first.
        results: (unit, share): whose results it waits for, longest first.
    """

    warps: tuple[int, ...]
    does: str
    instructions: int
    spent: dict[str, float]
    barriers: tuple[tuple[int, float], ...]
    results: tuple[tuple[str, float], ...]

    @property
    def name(self) -> str:
        first, last = self.warps[0], self.warps[-1]
        return f"{first}-{last}" if last > first else f"{first}"


def roles_of(program: Program, replays: Sequence[Replayed]) -> tuple[Role, ...]:
    """The roles of the cluster's first CTA."""
    groups: list[list[int]] = []
    codes = {warp: steps for cta, warp, steps in program.warps if cta == 0}
    for warp, steps in codes.items():
        if groups and _alike(codes[groups[-1][-1]], steps):
            groups[-1].append(warp)
        else:
            groups.append([warp])
    return tuple(_role(program, tuple(group), codes[group[0]], replays) for group in groups)


def _alike(a: Sequence[Step], b: Sequence[Step]) -> bool:
    one, other = {s.index for s in a}, {s.index for s in b}
    return len(one & other) > _ALIKE * len(one | other)


def _role(
    program: Program, warps: tuple[int, ...], steps: Sequence[Step], replays: Sequence[Replayed]
) -> Role:
    spent = dict.fromkeys(REASONS, 0.0)
    barriers: Counter[int] = Counter()
    results: Counter[str] = Counter()
    rows = [w for r in replays for w in r.warps if w["cta"] == 0 and w["warp"] in warps]
    for row in rows:
        whole = max(1, sum(row["spent"]))
        for reason, cycles in zip(REASONS, row["spent"], strict=True):
            spent[reason] += cycles / whole / len(rows)
        for _, offset, cycles in row["mbarriers"]:
            barriers[offset] += cycles / whole / len(rows)
        for _, unit, cycles in row["pipes"]:
            results[UNITS[unit]] += cycles / whole / len(rows)
    return Role(
        warps,
        _purpose(program, steps),
        len(steps),
        spent,
        tuple((k, v) for k, v in barriers.most_common() if v >= _WORTH),
        tuple((k, v) for k, v in results.most_common() if v >= _WORTH),
    )


def _purpose(program: Program, steps: Sequence[Step]) -> str:
    instructions = program.graph.code.instructions
    count = Counter(instructions[s.index].opcode for s in steps)
    pipes = Counter(instructions[s.index].pipe for s in steps)
    exponentials = pipes["MUFU"] > len(steps) / 50
    if pipes["tensor"]:
        return "products, exponentials" if exponentials else "products"
    if count["UTMALDG"] or count["UBLKCP"]:
        return "bulk loads"
    if count["UTMASTG"]:
        return "bulk stores"
    if exponentials:
        return "exponentials"
    return "tensor memory" if pipes["TMEM"] else "little"
