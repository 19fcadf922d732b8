"""From replayed work tiles to the time of a whole problem.

Two lengths of keys give the cycles of a key block and those of a work tile besides its blocks; two
work tiles of one CTA, where it takes several, give what a tile costs that does not start from
nothing. Then all tiles of the problem are handed out to the SMs (`fa4core.plan.makespan`). It is
averaged over seeds, because a single deterministic run can lock into one phase.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import cached_property

import attrs
import numpy as np

from fa4core.compile.sass_control import disassemble_with_control
from fa4core.plan import makespan
from fa4core.plan.plan import Plan
from fa4core.plan.problem import Problem
from fa4core.plan.target import target as planned
from fa4core.timing.match import Graph
from fa4core.timing.parameters import Parameters
from fa4core.timing.replay import Program, Replayed, program_of, replay
from fa4core.timing.subject import Run, Subject
from fa4core.variant import Variant

BLOCK = 128  # keys
SEEDS = 6
#: Key blocks of the two lengths, where the problem has as many.
FEW, MANY = 8, 16
#: From the end of a CTA to the first instruction of the next one on its SM. Assumed.
LAUNCH_CYCLES = 500


@attrs.frozen
class Spread:
    """A figure over seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


@attrs.frozen(eq=False, slots=False)
class Modelled:
    """What the model says about one kernel and one problem; every figure is modelled.

    Attributes:
        title: Whose kernel.
        rows: Queries of a work tile (all CTAs of a cluster together).
        ctas: Of a cluster.
        blocks: Key blocks of the two lengths.
        few, many, two: Replays by seed: the two lengths, and two tiles of the greater one by the
            same CTAs; empty if a CTA ends with its tile.
        program: What the greater length executes.
        blocks_of_tiles: Key blocks of every work tile of the problem, natural order.
        schedule_of: (durations of the tiles) -> cycles until the last SM is done.
        flop: Of the attended scores.
        clock_ghz: That the time is stated for.
        moving: Seconds to move inputs and outputs through global memory once.
    """

    title: str
    rows: int
    ctas: int
    blocks: tuple[int, int]
    few: tuple[Replayed, ...]
    many: tuple[Replayed, ...]
    two: tuple[Replayed, ...]
    program: Program
    work: makespan.WorkTiles
    subject: Subject
    sms: int
    flop: float
    clock_ghz: float
    moving: float

    @cached_property
    def block_cycles(self) -> Spread:
        """Of a key block of a work tile."""
        n = self.blocks[1] - self.blocks[0]
        return Spread(
            tuple((b.cycles - a.cycles) / n for a, b in zip(self.few, self.many, strict=True))
        )

    @cached_property
    def tile_cycles(self) -> Spread:
        """Of a work tile besides its blocks, when its CTA goes from tile to tile, or starts."""
        return Spread(
            tuple(
                whole - self.blocks[1] * block
                for whole, block in zip(self._tile, self.block_cycles.values, strict=True)
            )
        )

    @cached_property
    def setup_cycles(self) -> Spread:
        """That a CTA pays once, not for every tile."""
        return Spread(
            tuple(m.cycles - t for m, t in zip(self.many, self._tile, strict=True))
            if self.two
            else (0.0,) * len(self.many)
        )

    @property
    def _tile(self) -> list[float]:
        if self.two:
            return [t.cycles - m.cycles for m, t in zip(self.many, self.two, strict=True)]
        return [m.cycles + LAUNCH_CYCLES for m in self.many]

    @cached_property
    def cycles(self) -> Spread:
        """Of the whole problem."""
        order = makespan.arrange(self.work, self.subject.schedule)
        blocks = self.work.blocks[order]
        found = []
        for block, tile, setup in zip(
            self.block_cycles.values,
            self.tile_cycles.values,
            self.setup_cycles.values,
            strict=True,
        ):
            done = makespan.loads(
                blocks * block + tile, self.sms // self.ctas, self.subject.schedule.source
            )
            found.append(float(done.max(initial=0.0)) + setup)
        return Spread(tuple(found))

    @cached_property
    def seconds(self) -> Spread:
        """Of the whole problem, at least that of moving its data."""
        hertz = self.clock_ghz * 1e9
        return Spread(tuple(max(c / hertz, self.moving) for c in self.cycles.values))

    @cached_property
    def tflops(self) -> Spread:
        return Spread(tuple(self.flop / s / 1e12 for s in self.seconds.values))

    @cached_property
    def busy(self) -> dict[str, float]:
        """Cycles that each unit of an SM works for a key block of a work tile."""
        n = self.blocks[1] - self.blocks[0]
        pairs = list(zip(self.few, self.many, strict=True))
        return {
            unit: statistics.fmean((b.units[unit] - a.units[unit]) / n for a, b in pairs)
            for unit in self.many[0].units
        }


def model(
    subject: Subject,
    variant: Variant,
    problem: Problem,
    target: str,
    clock_ghz: float | None = None,
    seeds: int = SEEDS,
    parameters: Parameters | None = None,
) -> Modelled:
    """The modelled time of a kernel for a problem.

    Args:
        clock_ghz: That the time is stated for; the target's unless given.
        seeds: Runs to average.
        parameters: Other than the target's.

    Raises:
        NotImplementedError, ValueError: The kernel or the problem is not modelled; with the reason.
    """
    hardware = planned(target)
    rates = hardware.measured
    parameters = parameters or Parameters.of(rates)
    small = Measured.of(subject, variant, problem, target)
    programs = small.programs
    few, many, two = (
        tuple(replay(p, rates, parameters, seed) for seed in range(seeds)) if p else ()
        for p in programs
    )
    plan = Plan(variant, problem, hardware)
    p = problem
    moved = sum(p.seqlens_q) * p.heads_q + sum(p.seqlens_k) * p.heads_kv
    size = p.dtype.itemsize * (p.head_dim + p.head_dim_v)
    return Modelled(
        title=subject.title,
        rows=small.rows,
        ctas=small.ctas,
        blocks=small.blocks,
        few=few,
        many=many,
        two=two,
        program=programs[1],
        work=plan.work_tiles(small.rows),
        subject=subject,
        sms=rates.sms,
        flop=plan.attended * 2 * (p.head_dim + p.head_dim_v),
        clock_ghz=clock_ghz or rates.clock_ghz,
        moving=moved * size / (rates.hbm_tbps * 1e12),
    )


@attrs.frozen(eq=False)
class Measured:
    """What small problems execute.

    Attributes:
        rows, ctas, blocks: As of `Modelled`.
        programs: Of the two lengths, and of two tiles (None if no CTA takes two).
    """

    rows: int
    ctas: int
    blocks: tuple[int, int]
    programs: tuple[Program, Program, Program | None]

    @classmethod
    def of(cls, subject: Subject, variant: Variant, problem: Problem, target: str) -> Measured:
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


def sensitivity(
    programs: Sequence[Program], blocks: tuple[int, int], target: str, factor: float = 1.5
) -> dict[str, float]:
    """Relative change of the cycles of a key block when one parameter is multiplied."""
    rates = planned(target).measured
    base = Parameters.of(rates)

    def block(parameters: Parameters) -> float:
        runs = [
            np.mean([replay(p, rates, parameters, s).cycles for s in range(2)]) for p in programs
        ]
        return float(runs[1] - runs[0]) / (blocks[1] - blocks[0])

    before = block(base)
    return {
        field.name: block(
            attrs.evolve(base, **{field.name: getattr(base, field.name) * factor})
        ) / before - 1
        for field in attrs.fields(Parameters)
    }  # fmt: skip
