"""Control flow of machine code: basic blocks, natural loops, and the ways through a loop.

A loop of a pipelined kernel has branches that data decides (mask this tile or not, rescale or not)
and branches that only time decides (a barrier that is not there yet). `Loop.way` answers with the
shortest or the longest way through an iteration that performs every step of the protocol and
retries no wait. It knows the instruction set's branches and barriers, no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
import networkx as nx

from fa4core.compile.sass import Code, Instruction

_ENDS = {"EXIT", "RET", "KILL", "BRX", "JMX"}
_IDLE = {"barrier", "control", "uniform", "ALU", "FMA"}  # a retry has nothing but moves besides
_BRANCHES = {"BRA", "BRX", "JMP", "JMX", "BSYNC", *_ENDS}


def is_wait(i: Instruction) -> bool:
    """Whether it asks an mbarrier for a phase."""
    return i.opcode == "SYNCS" and "PHASECHK" in i.modifiers


def is_arrival(i: Instruction) -> bool:
    """Whether it arrives on an mbarrier, or has the tensor core arrive."""
    return i.opcode == "UTCBAR" or (i.opcode == "SYNCS" and "ARRIVE" in i.modifiers)


def is_step(i: Instruction) -> bool:
    """Whether it is a step of the protocol that other warps count on; waits, which may repeat, are
    not counted."""
    return is_arrival(i) or i.opcode == "BAR" or i.pipe in ("tensor", "TMA")


@attrs.frozen(eq=False)
class Loop:
    """A natural loop.

    Attributes:
        flow: What it is part of.
        head: Its first block.
        blocks: All of its blocks.
    """

    flow: Flow
    head: int
    blocks: frozenset[int]

    @property
    def instructions(self) -> list[Instruction]:
        """All of its instructions, whichever way they are on."""
        return [i for block in sorted(self.blocks) for i in self.flow.blocks[block]]

    @property
    def children(self) -> list[Loop]:
        """Loops directly inside."""
        inside = [o for o in self.flow.loops if o.head != self.head and o.blocks < self.blocks]
        return [o for o in inside if not any(o.blocks < other.blocks for other in inside)]

    @property
    def is_retry(self) -> bool:
        """Whether all it does is to wait for a barrier."""
        found = self.instructions
        idle = all(i.pipe in _IDLE and not is_step(i) for i in found)
        return idle and any(map(is_wait, found))

    def way(
        self,
        longest: bool,
        trips: Callable[[Loop], int] = lambda loop: 1,
        fewest_steps: bool = False,
    ) -> Way:
        """The shortest or longest way through one iteration; see the module.

        Args:
            longest: Or the shortest.
            trips: How often an inner loop runs each time.
            fewest_steps: Leave out every step of the protocol that can be left out, instead of
                performing all: for what only some iterations do.
        """
        graph, content = self._acyclic(longest, trips)
        sign = -1 if longest else 1
        step = 1 if fewest_steps else -1
        start = "head"
        best: dict = {start: (0, 0, 0)}
        came: dict = {}
        for node in nx.topological_sort(graph):
            if node not in best:
                continue
            steps, retries, length = best[node]
            own = content.get(node, Way((), ()))
            reached = (
                steps + step * sum(map(is_step, own.all)),
                retries + own.retries,
                length + sign * len(own.all),
            )
            for following in graph.successors(node):
                if following not in best or reached < best[following]:
                    best[following], came[following] = reached, node
        path = ["end"]
        while path[-1] != start:
            path.append(came[path[-1]])
        parts = [content[node] for node in reversed(path) if node in content]
        return Way(
            tuple(i for p in parts for i in p.own), tuple(i for p in parts for i in p.nested)
        )

    def _acyclic(self, longest: bool, trips: Callable[[Loop], int]) -> tuple[nx.DiGraph, dict]:
        """One iteration without cycles: inner loops as one node each, and what each node holds."""
        inner = {child.head: child for child in self.children}
        node_of = {b: child.head for child in inner.values() for b in child.blocks}
        content: dict = {}
        for block in self.blocks:
            node = node_of.get(block, block)
            if node in content:
                continue
            if node in inner:
                child = inner[node]
                way = child.way(longest, trips)
                content[node] = Way((), way.all * trips(child), int(child.is_retry))
            else:
                content[node] = Way(self.flow.blocks[block], ())
        graph = nx.DiGraph()
        graph.add_edge("head", node_of.get(self.head, self.head))
        for a, b in self.flow.graph.subgraph(self.blocks).edges:
            source, target = node_of.get(a, a), node_of.get(b, b)
            if b == self.head:
                graph.add_edge(source, "end")
            elif source != target:
                graph.add_edge(source, target)
        return graph, content


@attrs.frozen(eq=False)
class Way:
    """The instructions of one iteration.

    Attributes:
        own: Outside of inner loops.
        nested: Of inner loops, as often as they run.
        retries: How many inner loops that only retry a wait are on it.
    """

    own: tuple[Instruction, ...]
    nested: tuple[Instruction, ...]
    retries: int = 0

    @property
    def all(self) -> tuple[Instruction, ...]:
        return self.own + self.nested


@attrs.frozen(eq=False)
class Flow:
    """The control flow of a kernel.

    Attributes:
        blocks: Straight pieces of code.
        graph: Of their numbers; only what can be reached.
        loops: All natural loops, one for each head.
    """

    blocks: tuple[tuple[Instruction, ...], ...]
    graph: nx.DiGraph
    loops: list[Loop] = attrs.field(factory=list)

    def innermost(self, wanted: Callable[[Loop], bool]) -> list[Loop]:
        """Loops that are wanted and hold no other wanted one."""
        found = [loop for loop in self.loops if wanted(loop)]
        return [a for a in found if not any(b.blocks < a.blocks for b in found)]


def flow_of(code: Code) -> Flow:
    """Blocks and loops of a kernel."""
    starts = sorted(_leaders(code))
    number = {start: n for n, start in enumerate(starts)}
    ends = [*starts[1:], len(code.instructions)]
    blocks = tuple(code.instructions[a:z] for a, z in zip(starts, ends, strict=True))
    graph = nx.DiGraph()
    graph.add_node(0)
    for n, end in enumerate(ends):
        for target in _successors(code, end - 1):
            graph.add_edge(n, number[target])
    graph = graph.subgraph(nx.descendants(graph, 0) | {0}).copy()
    flow = Flow(blocks, graph)
    flow.loops.extend(_loops(flow))
    return flow


def _leaders(code: Code) -> set[int]:
    found = {0} | {at for at in code.labels.values() if at < len(code.instructions)}
    for n, i in enumerate(code.instructions[:-1]):
        if i.opcode in _BRANCHES:
            found.add(n + 1)
    return found


def _successors(code: Code, last: int) -> Iterable[int]:
    """Indices of the instructions that may follow the last one of a block."""
    i = code.instructions[last]
    jumps = i.opcode in ("BRA", "BRX", "JMP", "JMX")
    if jumps:
        yield from (code.labels[label] for label in i.targets)
    stops = i.opcode in _ENDS or jumps
    if last + 1 < len(code.instructions) and (not stops or i.conditional):
        yield last + 1


def _loops(flow: Flow) -> Iterable[Loop]:
    graph = flow.graph
    above = nx.immediate_dominators(graph, 0)
    bodies: dict[int, set[int]] = {}
    for tail, head in graph.edges:
        if _dominates(above, head, tail):
            body = bodies.setdefault(head, {head})
            body |= _reaching(graph, tail, head)
    return [Loop(flow, head, frozenset(body)) for head, body in bodies.items()]


def _dominates(above: dict[int, int], head: int, node: int) -> bool:
    while node != head and above.get(node, node) != node:
        node = above[node]
    return node == head


def _reaching(graph: nx.DiGraph, tail: int, head: int) -> set[int]:
    """Blocks that reach `tail` without passing `head`."""
    found, waiting = {head, tail}, [tail]
    while waiting:
        node = waiting.pop()
        if node == head:
            continue
        for before in graph.predecessors(node):
            if before not in found:
                found.add(before)
                waiting.append(before)
    return found
