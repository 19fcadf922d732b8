"""Where in the machine code the warps of a CTA lose their cycles: instruction by instruction."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache

import attrs

from fa4core.timing.problem import Modelled
from fa4core.timing.replay import REASONS

_LOST = ("fixed", "pipe", "operands", "mbarrier", "barrier")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")


@attrs.frozen
class Spot:
    """An instruction that is waited for; modelled.

    Attributes:
        cycles: Of a key block, lost in front of it, all warps of a CTA together.
        reason: Which most of them are, out of `fa4core.timing.replay.REASONS`.
        address: Bytes from the kernel's start.
        text: The instruction.
        source: "file:line" that it comes from, as far as that is known.
    """

    cycles: float
    reason: str
    address: int
    text: str
    source: str


def spots_of(kernel: Modelled, most: int = 20) -> list[Spot]:
    """Where a key block loses most cycles: the difference of the two lengths, mean over seeds."""
    lost: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    blocks = kernel.blocks[1] - kernel.blocks[0]
    weight = 1 / blocks / len(kernel.many)
    for sign, replays in ((1, kernel.many), (-1, kernel.few)):
        for index, reason, cycles in (s for r in replays for s in r.spots):
            if REASONS[reason] in _LOST:
                lost[index][REASONS[reason]] += sign * cycles * weight
    ranked = sorted(lost, key=lambda n: -sum(lost[n].values()))[:most]
    graph = kernel.program.graph
    sources = _sources(graph.ptx)
    found = []
    for n in ranked:
        i = graph.code.instructions[n]
        text = " ".join(filter(None, (i.guard, i.name, i.operands)))
        most_for, _ = max(lost[n].items(), key=lambda item: item[1])
        source = sources.get(int(graph.line[n]), "")
        found.append(Spot(sum(lost[n].values()), most_for, i.address, text, source))
    return found


@lru_cache(maxsize=8)
def _sources(ptx: str) -> dict[int, str]:
    """PTX line -> "file:line" of the source, from .loc."""
    files = {number: path.rsplit("/", 1)[-1] for number, path in _FILE.findall(ptx)}
    found: dict[int, str] = {}
    here = ""
    for n, line in enumerate(ptx.splitlines(), 1):
        if place := _LOC.match(line):
            here = f"{files.get(place[1], '?')}:{place[2]}"
        found[n] = here
    return found
