"""Kernels to time: ours and FlashAttention-4's, run in the emulator on problems of a few blocks.

A `Subject` takes numbers of queries, keys and heads and answers with the launch's trace and machine
code, compiled with line information. The SASS is the same as without.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import attrs
import torch

from fa4core.emulator.host import modules
from fa4core.emulator.session import Session, emulator
from fa4core.emulator.trace import Trace
from fa4core.plan.problem import Problem
from fa4core.reference.tiled import Call
from fa4core.variant import Variant
from primitives.schedule import Order, Schedule


@attrs.frozen(eq=False)
class Run:
    """One emulated launch.

    Attributes:
        trace: What its warps did.
        kernel: Entry name.
        ptx, cubin: Of the kernel.
        clusters: In the grid.
        ctas: Of a cluster.
    """

    trace: Trace
    kernel: str
    ptx: str
    cubin: bytes
    clusters: int
    ctas: int


@attrs.frozen(eq=False)
class Subject:
    """A forward kernel.

    Attributes:
        title: Whose it is.
        run: (queries, keys, heads, SMs) -> a launch with batch 1.
        schedule: How it hands out and orders the work tiles of a whole problem.
        keys: Of a block.
    """

    title: str
    run: Callable[[int, int, int, int], Run]
    schedule: Schedule
    keys: int = 128


def ours(variant: Variant, problem: Problem, target: str) -> Subject:
    """Our kernel for a call, with the schedule that the call gets.

    Raises:
        NotImplementedError, ValueError: There is none, or its schedule is not modelled.
    """
    from fa4core.dispatch import SKELETONS
    from fa4core.report.pipeline import call_for
    from fa4core.sm90.forward import launch as sm90
    from fa4core.sm100.forward import launch as sm100

    call = call_for(variant, problem, target)
    schedule_of = sm90.schedule_of if target == "sm90" else sm100.schedule_of
    schedule = schedule_of(call)
    if schedule.coordinates != "heads":
        raise NotImplementedError(
            f"the model hands out a query head's tiles, not {schedule.coordinates!r}; choose more "
            "queries or heads, or give the variant a schedule with coordinates='heads'"
        )
    fixed = attrs.evolve(variant, schedule=schedule)
    skeleton = _without_maxima(SKELETONS["sm90" if target == "sm90" else "sm100"])

    def run(queries: int, keys: int, heads: int, sms: int) -> Run:
        small = _small(problem, queries, keys, heads)
        return _run_ours(skeleton, call_for(fixed, small, target), target, sms)

    return Subject("ours", run, schedule, skeleton.spec_of(call, target).block)


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
    from fa4core.compile.build import build
    from fa4core.places import Place, in_emulator
    from fa4core.prepared import kernel_of, prepare

    kernel, _ = kernel_of(skeleton, call, Place(target, sms, True))
    if kernel is None:
        raise ValueError("no query and no key to attend to: such a call launches nothing")
    if kernel.key not in _BUILT:
        _BUILT[kernel.key] = build(kernel, line_info=True)
    package = _BUILT[kernel.key]
    cache.add(package)
    with emulator(target, seed=1, detect="none", num_sms=sms, record=False, trace=True) as session:
        q, k, v = _tensors(call.problem)
        prepare(skeleton, call, q, k, v, in_emulator(target))(q, k, v)
    return _last(session, package.cubin)


_BUILT: dict[str, Any] = {}


def fa4(variant: Variant, problem: Problem, target: str) -> Subject:
    """FlashAttention-4's kernel for a call, as its package chooses it.

    Raises:
        ModuleNotFoundError, NotImplementedError: It is not installed, or can't do it.
    """
    from fa4core.report.peer import fa4_arguments, import_fa4

    arguments = fa4_arguments(variant)
    interface = import_fa4()

    def run(queries: int, keys: int, heads: int, sms: int) -> Run:
        from fa4core.emulator.host.facade import cuda_facade

        small = _small(problem, queries, keys, heads)
        with (
            emulator(
                target, seed=1, detect="none", num_sms=sms, record=False, line_info=True,
                trace=True,
            ) as session,
            cuda_facade(session.target, session.num_sms),
            warnings.catch_warnings(),
        ):  # fmt: skip
            warnings.filterwarnings("ignore", "Argument .* cannot be converted")  # by the DSL
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            interface.flash_attn_func(*_tensors(small), return_lse=True, **arguments)
        return _last(session)

    # One CTA for each tile. Causal: longest first; in others tiles are alike.
    unequal = "causal" in arguments and "window_size" not in arguments
    order: Order = "longest_first" if unequal else "in_order"
    schedule = Schedule(source="one_tile", order=order, l2_sections=False)
    return Subject("fa4", run, schedule, _keys_of_fa4(interface, problem, target, arguments))


def _keys_of_fa4(interface: Any, p: Problem, target: str, arguments: dict[str, Any]) -> int:
    """Keys of a block, as the package chooses them; always 128 for Blackwell."""
    if target != "sm90":
        return 128
    chosen = interface._tile_size_fwd_sm90(
        p.head_dim, p.head_dim_v, "causal" in arguments, "window_size" in arguments
    )
    return chosen.n_block_size


def _small(problem: Problem, queries: int, keys: int, heads: int) -> Problem:
    return attrs.evolve(
        problem,
        batch=1,
        heads_q=heads,
        heads_kv=heads,
        seqlens_q=(queries,),
        seqlens_k=(keys,),
    )


def _tensors(p: Problem) -> tuple[torch.Tensor, ...]:
    """Normally distributed. Scores are small, so that no row is rescaled once it has a maximum:
    what is rare would be in all or in none of the few tiles that are replayed."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, rows, p.heads_q, d, generator=generator)
        for rows, d in (
            (p.seqlens_q[0], p.head_dim),
            (p.seqlens_k[0], p.head_dim),
            (p.seqlens_k[0], p.head_dim_v),
        )
    )
    return tuple(x.to(p.dtype) for x in (q / 4, k, v))


def _last(session: Session, cubin: bytes | None = None) -> Run:
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
    )
