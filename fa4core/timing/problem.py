"""From replayed work tiles to the time of a whole problem.

Two lengths give the cycles of a block (of keys; in backward passes of queries) and those of a work
tile besides its blocks; two work tiles of one CTA, where it takes several, give what a tile costs
that does not start from nothing. Then all tiles of the problem are handed out to the SMs
(`fa4core.plan.makespan`). It is averaged over seeds, because a single deterministic run can lock
into one phase.
"""

from __future__ import annotations

import statistics
from functools import cached_property, lru_cache

import attrs
import numpy as np

from fa4core.plan import makespan
from fa4core.plan.plan import Plan
from fa4core.plan.problem import Problem
from fa4core.plan.target import Rates
from fa4core.plan.target import target as planned
from fa4core.timing.parameters import Parameters, clock_of
from fa4core.timing.replay import Program, Replayed, replay
from fa4core.timing.small import Small, work_tiles
from fa4core.timing.subject import Subject
from fa4core.variant import Variant
from primitives.schedule import Schedule

SEEDS = 6
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
        backward: Whether it is a backward kernel, see `Subject`.
        rows: Of a work tile (all CTAs of a cluster together), see `Subject`.
        ctas: Of a cluster.
        packed: Query heads in a work tile.
        block: Keys of a block (backward: queries).
        blocks: Blocks of the two lengths.
        both: Blocks of the two work tiles.
        few, many, two: Replays by seed: the two lengths, and two tiles by the same CTAs, the longer
            one as in `many`; empty if a CTA ends with its tile.
        program: What the greater length executes.
        work: The work tiles of the problem, natural order.
        schedule: How they are handed out.
        sections: KV heads that fit the L2 cache together, for each sequence.
        deals: Whether static lists are dealt by time, see `makespan.loads`.
        sms: Of the GPU.
        flop: Of the attended scores.
        clock_ghz: That the time is stated for.
        moving: Seconds to move inputs and outputs through global memory once.
        around: Seconds of kernels before and after, which only move data through it: those that
            merge shares of the keys, or prepare and finish a backward pass.
    """

    title: str
    backward: bool
    rows: int
    ctas: int
    packed: int
    block: int
    blocks: tuple[int, int]
    both: int
    few: tuple[Replayed, ...]
    many: tuple[Replayed, ...]
    two: tuple[Replayed, ...]
    program: Program
    work: makespan.WorkTiles
    schedule: Schedule
    sections: np.ndarray
    deals: bool
    sms: int
    flop: float
    clock_ghz: float
    moving: float
    around: float

    @cached_property
    def block_cycles(self) -> Spread:
        """Of a block of a work tile."""
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
    def whole_tile(self) -> Spread:
        """Of a work tile of `blocks[1]` blocks."""
        return Spread(tuple(self._tile))

    @property
    def _tile(self) -> list[float]:
        if not self.two:
            return [m.cycles + LAUNCH_CYCLES for m in self.many]
        other = self.both - 2 * self.blocks[1]  # blocks that the other tile has more
        return [
            t.cycles - m.cycles - other * block
            for m, t, block in zip(self.many, self.two, self.block_cycles.values, strict=True)
        ]

    @cached_property
    def cycles(self) -> Spread:
        """Of the whole problem."""
        order = makespan.arrange(self.work, self.schedule, self.sections)
        if self.backward and self.schedule.source == "persistent":
            order = order[makespan.evened(self.work.blocks[order] + 1, self.sms // self.ctas)]
        blocks = self.work.blocks[order]
        found = []
        for block, tile, setup in zip(
            self.block_cycles.values,
            self.tile_cycles.values,
            self.setup_cycles.values,
            strict=True,
        ):
            durations = np.maximum(blocks * block + tile, LAUNCH_CYCLES)
            sms, source = self.sms // self.ctas, self.schedule.source
            done = makespan.loads(durations, sms, source, self.deals)
            found.append(float(done.max(initial=0.0)) + setup)
        return Spread(tuple(found))

    @cached_property
    def seconds(self) -> Spread:
        """Of the whole problem, at least that of moving its data."""
        hertz = self.clock_ghz * 1e9
        return Spread(tuple(max(c / hertz, self.moving) + self.around for c in self.cycles.values))

    @cached_property
    def tflops(self) -> Spread:
        return Spread(tuple(self.flop / s / 1e12 for s in self.seconds.values))

    @cached_property
    def busy(self) -> dict[str, float]:
        """Cycles that each unit of an SM works for a block of a work tile."""
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
    small: Small | None = None,
) -> Modelled:
    """The modelled time of a kernel for a problem.

    Args:
        clock_ghz: That the time is stated for; the target's unless given.
        seeds: Runs to average.
        parameters: Other than the target's.
        small: What the kernel executes, if it is known from a problem of the same variant.

    Raises:
        NotImplementedError, ValueError: The kernel or the problem is not modelled; with the reason.
    """
    hardware = planned(target)
    rates = hardware.measured
    parameters = parameters or Parameters.of(rates)
    small = small or Small.of(subject, variant, problem, target)
    few, many, two = (
        tuple(_replayed(p, rates, parameters, seed) for seed in range(seeds)) if p else ()
        for p in small.programs
    )
    plan, schedule = Plan(variant, problem, hardware), subject.schedule
    moved, around, of_head = (_backward_bytes if subject.backward else _bytes)(problem, schedule)
    flop = plan.attended * 2 * (problem.head_dim + problem.head_dim_v)
    return Modelled(
        title=subject.title,
        backward=subject.backward,
        rows=subject.rows,
        ctas=subject.ctas,
        packed=subject.packed,
        block=subject.block,
        blocks=small.blocks,
        both=small.both,
        few=few,
        many=many,
        two=two,
        program=small.programs[1],
        work=work_tiles(subject, plan, schedule.num_splits),
        schedule=schedule,
        sections=makespan.kv_heads_in_section(rates.l2_bytes, of_head),
        deals=hardware.deals and not subject.backward,
        sms=rates.sms,
        flop=flop * (2.5 if subject.backward else 1),
        clock_ghz=clock_ghz or clock_of(hardware),
        moving=moved / (rates.hbm_tbps * 1e12),
        around=around / (rates.hbm_tbps * 1e12),
    )


@lru_cache(maxsize=128)
def _replayed(program: Program, rates: Rates, parameters: Parameters, seed: int) -> Replayed:
    """Kept, for problems that differ in length often execute the same."""
    return replay(program, rates, parameters, seed)


def _bytes(p: Problem, schedule: Schedule) -> tuple[float, float, np.ndarray]:
    """That the kernel moves at least, that kernels around it move, and for each sequence what all
    tiles of a head read."""
    size = p.dtype.itemsize * (p.head_dim + p.head_dim_v)
    moved = sum(p.seqlens_q) * p.heads_q + sum(p.seqlens_k) * p.heads_kv
    # Output and LSE of each share, float32, written and read again.
    shared = 2 * schedule.num_splits * sum(p.seqlens_q) * p.heads_q * (p.head_dim_v + 1) * 4
    around = shared if schedule.num_splits > 1 else 0
    return moved * size, around, np.asarray(p.seqlens_k) * size


def _backward_bytes(p: Problem, schedule: Schedule) -> tuple[float, float, np.ndarray]:
    """The same. Before: O and dO are read, dQ is cleared, delta written; after: dQ converted."""
    size, queries = p.dtype.itemsize, sum(p.seqlens_q) * p.heads_q
    of_key = 2 * size * (p.head_dim + p.head_dim_v)  # K and V, dK and dV
    of_query = size * (p.head_dim + p.head_dim_v) + 4 * p.head_dim  # Q, dO; dQ is added to
    around = queries * (2 * size * p.head_dim_v + (4 + 4 + size) * p.head_dim + 3 * 4)
    moved = queries * of_query + sum(p.seqlens_k) * p.heads_kv * of_key
    return moved, around, np.asarray(p.seqlens_q, np.int64) * (of_query * p.group)
