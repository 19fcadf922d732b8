"""Which way through its machine code a warp took, found from the PTX statements that it executed.

The assembler keeps operations with effects (barriers, tensor core, TMA) in their order, so those of
the trace and those on the way through the control-flow graph correspond one by one; they are the
*anchors*. Between two anchors there are a few ways at most. The one is taken whose instructions
come from PTX lines that the warp did execute there; the best sequence of ways is found by dynamic
programming over the anchors, so that a choice that fails later is undone. Retries of barrier waits
are not followed: whoever replays the sequence waits instead.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import attrs
import numpy as np

from fa4core.compile.sass import Instruction
from fa4core.emulator.trace import Kind, WarpTrace
from fa4core.timing.graph import Graph, NoMatch

_ANCHOR_OF_KIND = {
    Kind.MBARRIER_INIT: "init",
    Kind.MBARRIER_ARRIVE: "arrive",
    Kind.MBARRIER_BYTES: "arrive",
    Kind.MBARRIER_WAIT: "wait",
    Kind.BARRIER_SYNC: "barrier",
    Kind.BARRIER_ARRIVE: "barrier",
    Kind.CLUSTER_ARRIVE: "cluster_arrive",
    Kind.CLUSTER_WAIT: "cluster_wait",
    Kind.MMA: "tensor",
    Kind.COMMIT: "commit",
    Kind.TMEM_LOAD: "tmem_load",
    Kind.TMEM_STORE: "tmem_store",
    Kind.BULK_LOAD: "bulk_load",
    Kind.BULK_STORE: "bulk_store",
}
_OTHER_LINE = -8.0  # score of an anchor whose instruction has another line
_NEAR = 2  # anchors around a way from which instructions may have been moved into it


@attrs.frozen(eq=False)
class Step:
    """One executed instruction.

    Attributes:
        index: Of the instruction in the code.
        events: What it did, as rows of a `WarpTrace.events`; empty if that is not known.
    """

    index: int
    events: tuple[tuple[int, ...], ...] = ()


@attrs.define(eq=False)
class _State:
    """The best way up to an anchor: where it came from, and how well it fits."""

    score: float
    way: tuple[int, ...]
    before: _State | None
    at: int


def match(graph: Graph, warp: WarpTrace, lines: np.ndarray) -> list[Step]:
    """The instructions that a warp executed, with what they did.

    Args:
        lines: Of the PTX statements, see `fa4core.emulator.trace.Trace`.

    Raises:
        NoMatch: Machine code and trace do not fit each other.
    """
    anchors = _anchors_of(warp)
    try:
        return _match(graph, warp, lines, anchors)
    except NoMatch:
        left = [group for group in anchors if not _left_out(graph, group, lines)]
        if len(left) == len(anchors):
            raise
    return _match(graph, warp, lines, left)


def _left_out(graph: Graph, group: list[tuple[int, ...]], lines: np.ndarray) -> bool:
    """Whether the assembler may have left an anchor out: loads whose results nobody uses.

    It need not have: where ends of branches are merged, an instruction has the line of one of them.
    """
    kind, line = _ANCHOR_OF_KIND[Kind(group[0][2])], lines[group[0][1]]
    return kind == "tmem_load" and not any(
        graph.anchor[n] == kind for n in np.flatnonzero(graph.line == line)
    )


def _match(
    graph: Graph, warp: WarpTrace, lines: np.ndarray, anchors: list[list[tuple[int, ...]]]
) -> list[Step]:
    """As `match`, with anchors that all are to be found."""
    executed = lines[warp.statements()]
    every = frozenset(executed.tolist())
    bounds = [-1, *(group[0][0] for group in anchors), len(executed)]
    between = [
        Counter(executed[bounds[n] + 1 : bounds[n + 1] + 1].tolist())
        for n in range(len(bounds) - 1)
    ]
    states = {0: _State(0.0, (0,), None, 0)}
    for n in range(len(anchors) + 1):
        near = frozenset().union(*between[max(0, n - _NEAR) : n + 1 + _NEAR])
        group = anchors[n] if n < len(anchors) else None
        reached: dict[int, _State] = {}
        for state in states.values():
            for way in graph.ways(state.at, every):
                fit = _fits(graph, way.end, group, lines)
                if fit is None:
                    continue
                score = state.score + fit + way.score(between[n], near)
                key = -1 if way.end is None else way.end
                if key not in reached or score > reached[key].score:
                    path = way.path if way.end is None else (*way.path, way.end)
                    reached[key] = _State(score, path, state, key)
        if not reached:
            raise NoMatch(_explain(graph, states, group, n, warp, lines))
        states = reached
    best = max(states.values(), key=lambda s: s.score)
    return _with_events(graph, _unrolled(best), anchors, warp, lines)


def _anchors_of(warp: WarpTrace) -> list[list[tuple[int, ...]]]:
    """Events that are anchors, those of one statement and class together."""
    groups: list[list[tuple[int, ...]]] = []
    for row in warp.events.tolist():
        kind = Kind(row[2])
        if kind not in _ANCHOR_OF_KIND or (kind == Kind.MBARRIER_WAIT and not row[6]):
            continue
        if groups and groups[-1][0][0] == row[0]:
            groups[-1].append(tuple(row))
        else:
            groups.append([tuple(row)])
    return groups


def _fits(
    graph: Graph, end: int | None, group: list[tuple[int, ...]] | None, lines: np.ndarray
) -> float | None:
    """How well an anchor fits an instruction, or None if it can't be it.

    The line is evidence, not proof: the assembler merges equal ends of branches, and the first try
    of a wait has the line of what stands before the wait.
    """
    if end is None or group is None:
        return 0.0 if end is None and group is None else None
    kind = _ANCHOR_OF_KIND[Kind(group[0][2])]
    if graph.anchor[end] != kind:
        return None
    unsure = kind == "wait" and not graph.sleeps[end]
    return 0.0 if unsure or graph.line[end] == lines[group[0][1]] else _OTHER_LINE


def _unrolled(state: _State | None) -> list[tuple[int, bool]]:
    """Instructions, each with whether it is the anchor that its way ends with."""
    parts: list[list[tuple[int, bool]]] = []
    while state is not None:
        inside = [(n, False) for n in state.way]
        if state.before is not None and state.at >= 0:
            inside[-1] = (state.at, True)
        parts.append(inside)
        state = state.before
    return [step for part in reversed(parts) for step in part]


def _with_events(
    graph: Graph,
    indices: list[tuple[int, bool]],
    anchors: list[list[tuple[int, ...]]],
    warp: WarpTrace,
    lines: np.ndarray,
) -> list[Step]:
    """Anchors get their events in order; memory accesses get those of their line in order."""
    others: dict[int, list[list[tuple[int, ...]]]] = defaultdict(list)
    for row in warp.events.tolist():
        if Kind(row[2]) in _ANCHOR_OF_KIND:
            continue
        queue = others[int(lines[row[1]])]
        if queue and queue[-1][0][0] == row[0]:
            queue[-1].append(tuple(row))
        else:
            queue.append([tuple(row)])
    taken: dict[int, int] = defaultdict(int)
    steps, position = [], 0
    for n, is_anchor in indices:
        if is_anchor:
            steps.append(Step(n, tuple(anchors[position])))
            position += 1
            continue
        if graph.anchor[n] is not None:  # under a guard that did not hold
            continue
        line = int(graph.line[n])
        if line in others and _does(graph.code.instructions[n]) and taken[line] < len(others[line]):
            steps.append(Step(n, tuple(others[line][taken[line]])))
            taken[line] += 1
        else:
            steps.append(Step(n))
    return steps


_DOERS = re.compile(r"(LDS|STS|LDG|STG|ATOM|RED|LDGSTS|UTMACMDFLUSH|DEPBAR|ARRIVES|UGETNEXTWORKID)")


def _does(i: Instruction) -> bool:
    """Whether it can be what an event that is no anchor says."""
    return _DOERS.match(i.opcode) is not None and i.opcode != "REDUX"


def _explain(
    graph: Graph,
    states: dict[int, _State],
    group: list[tuple[int, ...]] | None,
    n: int,
    warp: WarpTrace,
    lines: np.ndarray,
) -> str:
    """From where no way leads on, and what it should lead to."""
    where = sorted(f"{graph.code.instructions[s.at].address:#x}" for s in states.values())
    if group is None:
        what = "the end"
    else:
        what = f"{Kind(group[0][2]).name} of PTX line {lines[group[0][1]]}"
    return (
        f"warp {warp.warp} of CTA {warp.cta}: no way from {', '.join(where)} to {what} (anchor {n})"
    )
