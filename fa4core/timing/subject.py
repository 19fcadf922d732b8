"""Kernels to time: `Subject`, and ours, run in the emulator on problems of a few blocks.

A `Subject` takes numbers of queries, keys and heads and answers with the launch's trace and machine
code, compiled with line information. The SASS is the same as without. FlashAttention-4's is made in
`fa4core.timing.peer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from fa4core.emulator.host import modules
from fa4core.emulator.launch import Launch
from fa4core.emulator.session import Session, emulator
from fa4core.emulator.trace import Trace
from fa4core.plan.problem import Problem
from fa4core.reference.tiled import Call
from fa4core.variant import Variant
from primitives.schedule import Schedule


@attrs.frozen(eq=False)
class Run:
    """One emulated launch.

    Attributes:
        trace: What its warps did.
        kernel: Entry name.
        ptx, cubin: Of the kernel.
        clusters: In the grid.
        ctas: Of a cluster.
        smem_bytes: Shared memory of a CTA that the launch asks for.
        around: Launches before and after it that the same call takes.
    """

    trace: Trace
    kernel: str
    ptx: str
    cubin: bytes
    clusters: int
    ctas: int
    smem_bytes: int
    around: tuple[Launch, ...]


@attrs.frozen(eq=False)
class Subject:
    """A kernel: its work tiles are of queries and visit blocks of keys; the other way round in a
    backward pass.

    Attributes:
        title: Whose it is.
        run: (queries, keys, heads, SMs) -> a launch with batch 1 and so many KV heads, each with
            `packed` query heads.
        schedule: How it hands out and orders the work tiles of a whole problem.
        rows: Queries of a work tile, of all CTAs of a cluster together (backward: keys).
        ctas: Of a cluster.
        packed: Query heads in a work tile.
        block: Keys of a block (backward: queries).
        several: Whether it takes several work tiles of a head for the kernel to be the problem's.
        backward: Whether it is a backward kernel.
    """

    title: str
    run: Callable[[int, int, int, int], Run]
    schedule: Schedule
    rows: int
    ctas: int = 1
    packed: int = 1
    block: int = 128
    several: bool = False
    backward: bool = False


def ours(variant: Variant, problem: Problem, target: str, ctas: int | None = None) -> Subject:
    """Our kernel for a call, with the schedule that the call gets.

    Args:
        ctas: That share a work tile; what the call gets unless given.

    Raises:
        NotImplementedError, ValueError: There is none, or it is not modelled.
    """
    from fa4core.dispatch import SKELETONS
    from fa4core.report.pipeline import call_for

    if problem.page_size is not None:
        raise NotImplementedError("keys in pages are not modelled; choose keys in one tensor")
    skeleton = _without_maxima(SKELETONS["sm90" if target == "sm90" else "sm100"])
    schedule = _schedule(variant, problem, target)
    if ctas is not None:
        schedule = attrs.evolve(schedule, ctas=ctas)
    spec = skeleton.spec_of(call_for(_with(variant, schedule), problem, target), target)
    # How many shares there are is not compiled in, so two stand for all.
    small_schedule = attrs.evolve(schedule, num_splits=min(2, schedule.num_splits))

    def run(queries: int, keys: int, heads: int, sms: int) -> Run:
        small = small_problem(problem, queries, keys, heads, spec.packed)
        call = call_for(_with(variant, small_schedule), small, target)
        return _run_ours(skeleton, call, target, sms)

    clusters = getattr(spec, "ctas", 1)
    return Subject(
        title="ours" if ctas is None else f"ours, {ctas} CTA{'s' if ctas > 1 else ''}",
        run=run,
        schedule=schedule,
        rows=spec.queries * spec.tiles * clusters,
        ctas=clusters,
        packed=spec.packed,
        block=spec.block,
    )


def _schedule(variant: Variant, problem: Problem, target: str) -> Schedule:
    """That a call gets."""
    from fa4core.report.pipeline import call_for
    from fa4core.sm90.forward import launch as sm90
    from fa4core.sm100.forward import launch as sm100

    schedule_of = sm90.schedule_of if target == "sm90" else sm100.schedule_of
    return schedule_of(call_for(variant, problem, target))


def _with(variant: Variant, schedule: Schedule) -> Variant:
    return attrs.evolve(variant, schedule=schedule)


def _without_maxima(skeleton: Any) -> Any:
    """The skeleton's quicker kernel, if it has one: what a plain call launches."""
    lean = skeleton.lean
    if lean is None:
        return skeleton
    return attrs.evolve(
        skeleton, spec_of=lambda call, target: lean(skeleton.spec_of(call, target)), lean=None
    )


def _run_ours(skeleton: Any, call: Call, target: str, sms: int) -> Run:
    from fa4core.compile import cache
    from fa4core.places import Place, in_emulator
    from fa4core.prepared import kernel_of, prepare

    kernel, _ = kernel_of(skeleton, call, Place(target, sms, True))
    if kernel is None:
        raise ValueError("no query and no key to attend to: such a call launches nothing")
    package = built_with_lines(kernel)
    cache.add(package)
    with emulator(target, seed=1, detect="none", num_sms=sms, record=False, trace=True) as session:
        q, k, v = tensors(call.problem)
        prepare(skeleton, call, q, k, v, in_emulator(target))(q, k, v)
    return largest(session, package.cubin)


_BUILT: dict[str, Any] = {}


def built_with_lines(kernel: Any) -> Any:
    """The package of a kernel, with line information; compiled once."""
    from fa4core.compile.build import build

    if kernel.key not in _BUILT:
        _BUILT[kernel.key] = build(kernel, line_info=True)
    return _BUILT[kernel.key]


def small_problem(problem: Problem, queries: int, keys: int, heads: int, packed: int) -> Problem:
    """One sequence of a problem's kind, with `packed` query heads for each KV head."""
    return attrs.evolve(
        problem,
        batch=1,
        heads_q=heads * packed,
        heads_kv=heads,
        seqlens_q=(queries,),
        seqlens_k=(keys,),
        starts_q=None if problem.starts_q is None else (0,),
        starts_k=None if problem.starts_k is None else (0,),
    )


def tensors(p: Problem) -> tuple[torch.Tensor, ...]:
    """Normally distributed. Scores are small, so that no row is rescaled once it has a maximum:
    what is rare would be in all or in none of the few tiles that are replayed."""
    generator = torch.Generator().manual_seed(0)
    to_q, to_k = ((1,) if starts is None else () for starts in (p.starts_q, p.starts_k))
    q, k, v = (
        torch.randn(shape, generator=generator)
        for shape in (
            (*to_q, p.seqlens_q[0], p.heads_q, p.head_dim),
            (*to_k, p.seqlens_k[0], p.heads_kv, p.head_dim),
            (*to_k, p.seqlens_k[0], p.heads_kv, p.head_dim_v),
        )
    )
    return tuple(x.to(p.dtype) for x in (q / 4, k, v))


def largest(session: Session, cubin: bytes | None = None) -> Run:
    """The launch with most warps' work: a call may launch others before or after it."""
    traces = [s.trace for s in session.statistics if s.trace is not None]
    sizes = [sum(int(w.runs[:, 1].sum()) for w in trace.warps) for trace in traces]
    which = sizes.index(max(sizes))
    launch, trace = session.launches[which], traces[which]
    ctas, grid = launch.cluster, launch.grid
    count = ctas[0] * ctas[1] * ctas[2]
    return Run(
        trace,
        launch.kernel,
        launch.ptx,
        cubin or modules.cubin_of(launch.ptx),
        grid[0] * grid[1] * grid[2] // count,
        count,
        launch.dynamic_smem,
        tuple(other for other in session.launches if other is not launch),
    )
