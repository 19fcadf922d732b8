"""The small problems that a kernel is replayed on: one and two work tiles, of two lengths."""

from __future__ import annotations

import attrs

from fa4core.compile.sass_control import disassemble_with_control
from fa4core.plan.plan import Plan
from fa4core.plan.problem import Problem
from fa4core.plan.target import target as planned
from fa4core.timing.graph import Graph
from fa4core.timing.replay import Program, program_of
from fa4core.timing.subject import Run, Subject
from fa4core.variant import Variant

#: Key blocks of the greater length, where the problem has as many; the other has half of those
#: that are then visited.
MANY = 16


@attrs.frozen(eq=False)
class Small:
    """What they execute.

    Attributes:
        rows, ctas, blocks: As of `Modelled`.
        programs: Of the two lengths, and of two tiles (None if no CTA takes two).
    """

    rows: int
    ctas: int
    blocks: tuple[int, int]
    programs: tuple[Program, Program, Program | None]

    @classmethod
    def of(cls, subject: Subject, variant: Variant, problem: Problem, target: str) -> Small:
        """Run a subject on problems of one and of two work tiles."""
        keys = subject.keys
        most = max(2, min(MANY, -(-max(problem.seqlens_k) // keys)))
        rows, ctas = _tile(subject)
        many = _blocks(variant, problem, target, rows, most * keys, keys)
        fewer = max(1, many // 2)
        few = _blocks(variant, problem, target, rows, fewer * keys, keys)
        if few >= many:
            raise ValueError(
                f"{fewer} and {most} blocks of keys give work tiles of {few} and {many} blocks to "
                "visit; the model needs two different numbers"
            )
        runs = [subject.run(rows, n * keys, 1, ctas) for n in (fewer, most)]
        graph = _graph(runs[1])
        programs = [program_of(_same(graph, runs[1], r), r.trace, 0, r.ctas) for r in runs]
        pair = subject.run(rows, most * keys, 2, ctas)
        started = {w.cta // pair.ctas for w in pair.trace.warps}
        both = None
        if len(started) == 1:
            both = program_of(_same(graph, runs[1], pair), pair.trace, 0, pair.ctas)
        return cls(rows, ctas, (few, many), (programs[0], programs[1], both))


def _tile(subject: Subject) -> tuple[int, int]:
    """Queries of a work tile and CTAs of a cluster, found out by a launch of several tiles."""
    probe = 768  # a multiple of the tiles of all kernels
    found = subject.run(probe, probe, 1, 148)
    return probe // max(1, found.clusters), found.ctas


def _graph(run: Run) -> Graph:
    codes = {code.kernel: (code, control) for code, control in disassemble_with_control(run.cubin)}
    if run.kernel not in codes:
        raise ValueError(f"there is no kernel {run.kernel} in its machine code")
    return Graph(*codes[run.kernel], run.ptx)


def _same(graph: Graph, of: Run, run: Run) -> Graph:
    """The graph, if a run has the code that it was made from."""
    return graph if run.cubin == of.cubin else _graph(run)


def _blocks(
    variant: Variant, problem: Problem, target: str, rows: int, seqlen: int, keys: int
) -> int:
    """Key blocks that the work tile of a small problem visits."""
    small = attrs.evolve(
        problem, batch=1, heads_q=1, heads_kv=1, seqlens_q=(rows,), seqlens_k=(seqlen,)
    )
    (visited,) = Plan(variant, small, planned(target)).work_tiles(rows, keys).blocks.tolist()
    return visited
