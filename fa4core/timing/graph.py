"""The control-flow graph of machine code, as a search for the way of a warp sees it.

*Anchors* are instructions with effects in order: barriers, tensor core, bulk copies, tensor memory.
`Graph.ways` lists what can lie between one and the next. `fa4core.timing.match` uses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set

import attrs
import numpy as np

from fa4core.compile.sass import Code, Instruction
from fa4core.compile.sass_control import Control

_ANCHOR_OF_OPCODE = {
    "UTCBAR": "commit",
    "UCGABAR_ARV": "cluster_arrive",
    "UCGABAR_WAIT": "cluster_wait",
    "LDTM": "tmem_load",
    "STTM": "tmem_store",
    "UTMALDG": "bulk_load",
    "UBLKCP": "bulk_load",
    "UTMASTG": "bulk_store",
    "UTMAREDG": "bulk_store",
    "UBLKRED": "bulk_store",
    "BAR": "barrier",
}
_MANAGEMENT = ("tcgen05.alloc", "tcgen05.dealloc", "tcgen05.relinquish")  # have barriers inside
_MOST_WAYS = 4000  # between two anchors
_RETRY = -6.0  # of an instruction that a wait only needs if it fails


class NoMatch(ValueError):
    """The machine code has no way that does what the trace says."""


def _anchor(i: Instruction, line: str) -> str | None:
    """The class of an instruction that has an effect in order, or None."""
    if any(name in line for name in _MANAGEMENT):
        return None
    if i.opcode == "SYNCS":
        if "EXCH" in i.modifiers:
            return "init"
        if "PHASECHK" in i.modifiers:
            return "wait" if "TRYWAIT" in i.modifiers else None  # others are tests after a sleep
        return "arrive" if "ARRIVE" in i.modifiers else None
    return "tensor" if i.pipe == "tensor" else _ANCHOR_OF_OPCODE.get(i.opcode)


@attrs.frozen(eq=False)
class Way:
    """Instructions between two anchors.

    Attributes:
        path: Their indices.
        end: The anchor behind them; None at the end of the code.
        lines: Each PTX line that they come from, how many do, and how often the way passes there.
        cost: Against taking it, whatever was executed.
    """

    path: tuple[int, ...]
    end: int | None
    lines: tuple[tuple[int, int, int], ...]
    cost: float

    def score(self, here: Mapping[int, int], near: Set[int]) -> float:
        """Instructions of executed lines, less those of lines that were not, or not so often.

        Args:
            here: How often each line was executed between the anchors.
            near: Lines executed a little before or after: their instructions may have been moved.
        """
        fit = 0.0
        for line, n, times in self.lines:
            executed = here.get(line, 0)
            if not executed and line in near:
                continue
            surplus = max(0, times - executed)
            fit += (times - 3 * surplus) * n / times
        return fit + self.cost


class Graph:
    """Machine code with its control flow and anchors, to be asked for the ways of many warps."""

    def __init__(self, code: Code, control: Sequence[Control], ptx: str):
        self.code, self.control, self.ptx = code, control, ptx
        lines = ["", *ptx.splitlines()]
        self.text = [lines[c.line] if c.line < len(lines) else "" for c in control]
        found = code.instructions
        self.forbidden = np.array([i.opcode in ("CALL", "BPT") for i in found])  # broken programs
        self.sleeps = [self._sleeps(n) for n in range(len(found))]
        self.anchor = [_anchor(i, self.text[n]) for n, i in enumerate(found)]
        self.cost = np.array([_RETRY if i.opcode == "NANOSLEEP" else 0.0 for i in found])
        self.next = [self._successors(n) for n in range(len(found))]
        self.line = np.array([c.line for c in control])
        self._block = self._blocks()
        self._ways: dict[tuple[int, Set[int] | None], list[Way]] = {}
        self._many: set[int] = set()  # where there are too many ways to look at all

    def _sleeps(self, n: int) -> bool:
        """Whether a wait is a retry, or has its retry behind it: its line is then its own."""
        found = self.code.instructions
        return n + 1 < len(found) and found[n + 1].opcode == "NANOSLEEP"

    def _successors(self, n: int) -> tuple[int, ...]:
        i = self.code.instructions[n]
        behind = (n + 1,) if n + 1 < len(self.code.instructions) else ()
        if i.opcode in ("EXIT", "RET", "KILL"):
            return behind if i.guard else ()
        if i.opcode in ("BRA", "BRX", "JMP"):
            targets = tuple(self.code.labels[t] for t in i.targets)
            return targets + behind if i.conditional else targets
        return behind

    def _blocks(self) -> np.ndarray:
        """The number of each instruction's basic block."""
        first = np.zeros(len(self.next) + 1, bool)
        for n, following in enumerate(self.next):
            if following != (n + 1,):
                first[[n + 1, *following]] = True
        return np.cumsum(first[:-1])

    def ways(self, start: int, lines: frozenset[int]) -> list[Way]:
        """Ways from behind `start` to the next anchor, or to the end; if there are too many, only
        those through basic blocks that have one of the lines that a warp executed."""
        key = start, lines if start in self._many else None
        if key not in self._ways:
            try:
                self._ways[key] = list(self._find(start, None if key[1] is None else lines))
            except NoMatch:
                if key[1] is not None:
                    raise
                self._many.add(start)
                return self.ways(start, lines)
        return self._ways[key]

    def _closed(self, lines: frozenset[int]) -> np.ndarray:
        """Whether an instruction is in a basic block with none of these lines."""
        known = np.isin(self.line, list(lines)) | (self.line == 0)
        return ~np.isin(self._block, self._block[known])

    def _find(self, start: int, lines: frozenset[int] | None) -> Iterator[Way]:
        closed = self.forbidden if lines is None else (self.forbidden | self._closed(lines))
        count = 0
        stack: list[tuple[list[int], int]] = [([], n) for n in self.next[start]]
        if not stack:
            yield self._way([], None)
        while stack:
            path, at = stack.pop()
            while not closed[at]:
                if self.anchor[at] is not None:
                    count += 1
                    yield self._way(path, at)
                    if not self.code.instructions[at].guard:
                        break
                if path.count(at) > 1:  # a loop without anchors: twice is enough
                    break
                path.append(at)
                following = self.next[at]
                if self.code.instructions[at].opcode == "EXIT" or not following:
                    count += 1
                    yield self._way(path, None)
                if not following:
                    break
                stack += [(list(path), n) for n in following[1:]]
                at = following[0]
            if count > _MOST_WAYS:
                raise NoMatch(f"more than {_MOST_WAYS} ways between two anchors")

    def _way(self, path: list[int], end: int | None) -> Way:
        passes = Counter(path)
        count: Counter[int] = Counter()
        times: dict[int, int] = {}
        for n, visits in passes.items():
            line = int(self.line[n])
            count[line] += visits
            times[line] = max(times.get(line, 0), visits)
        lines = tuple((line, n, times[line]) for line, n in count.items())
        return Way(tuple(path), end, lines, float(self.cost[path].sum()))
