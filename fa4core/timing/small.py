"""The small problems that a kernel is replayed on: one and two work tiles, of two lengths."""

from __future__ import annotations

from collections import Counter

import attrs

from fa4core.compile.sass_control import disassemble_with_control
from fa4core.emulator.trace import Kind
from fa4core.plan.makespan import WorkTiles
from fa4core.plan.plan import Plan
from fa4core.plan.problem import Problem
from fa4core.plan.target import target as planned
from fa4core.timing.graph import Graph
from fa4core.timing.replay import Program, program_of
from fa4core.timing.subject import Run, Subject, small_problem
from fa4core.variant import Variant

#: Blocks of the greater length, where the problem has as many; the other has half of those
#: that are then visited.
MANY = 16
ALL_SMS = 148  # enough for a CTA for each work tile


@attrs.frozen(eq=False)
class Small:
    """What they execute.

    Attributes:
        blocks: Blocks of the two lengths.
        programs: Of a work tile of each length, and of two tiles (None if no CTA takes two).
        both: Blocks of the two tiles together.
    """

    blocks: tuple[int, int]
    programs: tuple[Program, Program, Program | None]
    both: int

    @classmethod
    def of(cls, subject: Subject, variant: Variant, problem: Problem, target: str) -> Small:
        """Run a subject on problems of one and of two work tiles."""
        shares = min(2, subject.schedule.num_splits)
        single = shares == 1 and not subject.several and not subject.backward

        def visited(blocks: int) -> list[int]:
            return _visited(subject, variant, problem, target, _sizes(subject, blocks))

        def run(blocks: int, heads: int, sms: int) -> Run:
            return subject.run(*_sizes(subject, blocks), heads, sms)

        along = problem.seqlens_q if subject.backward else problem.seqlens_k
        most = -(-max(along) // subject.block // subject.schedule.num_splits)
        most = max(2, min(MANY, most))
        many = max(visited(most))
        fewer = max(1, many // 2)
        few = max(visited(fewer))
        if few >= many:
            raise ValueError(
                f"{fewer} and {most} blocks give work tiles of {few} and {many} blocks to visit; "
                "the model needs two different numbers"
            )
        runs = [run(fewer, 1, ALL_SMS), run(most, 1, ALL_SMS)]
        graph = _graph(runs[1])
        short, long = (_program(_same(graph, runs[1], r), r, _longest(r)) for r in runs)
        of_pair = 2 * subject.rows // subject.block if subject.backward else most
        pair = run(of_pair, 2 if single else 1, subject.ctas)
        started = {w.cta // pair.ctas for w in pair.trace.warps}
        both = None
        if len(started) == 1:
            both = _program(_same(graph, runs[1], pair), pair, 0)
        of_both = 2 * many if single else sum(visited(of_pair))
        return cls((few, many), (short, long, both), of_both)


def _sizes(subject: Subject, blocks: int) -> tuple[int, int]:
    """Queries and keys of a problem whose work tiles visit so many blocks, where the mask lets
    them. In backward passes there are as many keys as queries: where masks look back, only then
    the first keys meet all queries."""
    if subject.backward:
        return blocks * subject.block, blocks * subject.block
    shares = min(2, subject.schedule.num_splits)
    return subject.rows * (2 if subject.several else 1), blocks * shares * subject.block


def _longest(run: Run) -> int:
    """The cluster with most products: that of the longest work tile."""
    products: Counter[int] = Counter()
    for warp in run.trace.warps:
        products[warp.cta // run.ctas] += int((warp.events[:, 2] == Kind.MMA).sum())
    return max(sorted(products), key=products.__getitem__)


def _program(graph: Graph, run: Run, cluster: int) -> Program:
    return program_of(graph, run.trace, cluster, run.ctas)


def _graph(run: Run) -> Graph:
    codes = {code.kernel: (code, control) for code, control in disassemble_with_control(run.cubin)}
    if run.kernel not in codes:
        raise ValueError(f"there is no kernel {run.kernel} in its machine code")
    return Graph(*codes[run.kernel], run.ptx)


def _same(graph: Graph, of: Run, run: Run) -> Graph:
    """The graph, if a run has the code that it was made from."""
    return graph if run.cubin == of.cubin else _graph(run)


def _visited(
    subject: Subject, variant: Variant, problem: Problem, target: str, sizes: tuple[int, int]
) -> list[int]:
    """Blocks that each work tile of a small problem visits."""
    small = small_problem(problem, *sizes, 1, subject.packed)
    shares = min(2, subject.schedule.num_splits)
    return work_tiles(subject, Plan(variant, small, planned(target)), shares).blocks.tolist()


def work_tiles(subject: Subject, plan: Plan, shares: int) -> WorkTiles:
    """The work tiles of a plan, as a subject's kernel has them, their blocks in shares."""
    if subject.backward:
        return plan.key_tiles(subject.rows, subject.block)
    tiles = plan.work_tiles(subject.rows, subject.block, subject.packed)
    return tiles.split(shares) if shares > 1 else tiles
