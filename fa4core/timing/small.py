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

BLOCK = 128  # keys
#: Key blocks of the two lengths, where the problem has as many.
FEW, MANY = 8, 16


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
        most = max(1, -(-max(problem.seqlens_k) // BLOCK))
        lengths = (max(1, min(FEW, most // 2)), max(2, min(MANY, most)))
        rows, ctas = _tile(subject, lengths[0] * BLOCK)
        runs = [subject.run(rows, n * BLOCK, 1, ctas) for n in lengths]
        blocks = [_blocks(variant, problem, target, rows, n) for n in lengths]
        if blocks[0] == blocks[1]:
            shorter = max(1, blocks[1] // 2)
            runs[0] = subject.run(rows, shorter * BLOCK, 1, ctas)
            blocks[0] = _blocks(variant, problem, target, rows, shorter)
        if blocks[0] >= blocks[1]:
            raise ValueError(
                f"{lengths[0]} and {lengths[1]} blocks of keys give work tiles of {blocks[0]} and "
                f"{blocks[1]} blocks to visit; the model needs two different numbers"
            )
        graph = _graph(runs[1])
        programs = [program_of(_same(graph, runs[1], r), r.trace, 0, r.ctas) for r in runs]
        pair = subject.run(rows, lengths[1] * BLOCK, 2, ctas)
        started = {w.cta // pair.ctas for w in pair.trace.warps}
        both = None
        if len(started) == 1:
            both = program_of(_same(graph, runs[1], pair), pair.trace, 0, pair.ctas)
        return cls(rows, ctas, (blocks[0], blocks[1]), (programs[0], programs[1], both))


def _tile(subject: Subject, keys: int) -> tuple[int, int]:
    """Queries of a work tile and CTAs of a cluster, found out by a launch of 512 queries."""
    probe = 512
    found = subject.run(probe, keys, 1, 148)
    return probe // max(1, found.clusters), found.ctas


def _graph(run: Run) -> Graph:
    codes = {code.kernel: (code, control) for code, control in disassemble_with_control(run.cubin)}
    if run.kernel not in codes:
        raise ValueError(f"there is no kernel {run.kernel} in its machine code")
    return Graph(*codes[run.kernel], run.ptx)


def _same(graph: Graph, of: Run, run: Run) -> Graph:
    """The graph, if a run has the code that it was made from."""
    return graph if run.cubin == of.cubin else _graph(run)


def _blocks(variant: Variant, problem: Problem, target: str, rows: int, blocks: int) -> int:
    """Key blocks that the work tile of a small problem visits."""
    small = attrs.evolve(
        problem, batch=1, heads_q=1, heads_kv=1, seqlens_q=(rows,), seqlens_k=(blocks * BLOCK,)
    )
    (visited,) = Plan(variant, small, planned(target)).work_tiles(rows).blocks.tolist()
    return visited
