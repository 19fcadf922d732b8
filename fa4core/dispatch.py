"""From an operator's arguments to what runs: checks, the backend, the plan, prepared kernels.

`fa4core.ops` and `fa4core.attention` ask for it where they find no call that was kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import cast

import torch

from fa4core.backends import (
    KERNELS,
    announce,
    check,
    choose,
    emulated_target,
    family_of,
    gradients_by,
    target_of,
)
from fa4core.backward.launch import launches
from fa4core.backward.prepared import prepare as prepare_backward
from fa4core.compile.kernel import Kernel
from fa4core.kept import Calls
from fa4core.places import Place, in_emulator, on_device
from fa4core.plan.captured import check_reads
from fa4core.plan.problem import Problem
from fa4core.plan.target import target as planned
from fa4core.plan.tiles import TileMap, tile_map
from fa4core.prepared import Prepared, kernel_of, prepare
from fa4core.program import Program
from fa4core.recall import can_be_kept, kept
from fa4core.reference.backward import Gradients
from fa4core.reference.backward import backward as tiled_backward
from fa4core.reference.tiled import Call
from fa4core.sm90.backward import launch as sm90_backward
from fa4core.sm90.forward import launch as sm90
from fa4core.sm100.backward import launch as sm100_backward
from fa4core.sm100.forward import launch as sm100
from fa4core.variant import Variant
from primitives.sequence import Layout

Tensor = torch.Tensor


def plan_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captured: list[Tensor],
    layout: Layout,
    spec: str,
    scale: float | None,
    backend: str,
) -> tuple[Call, str]:
    """Check everything; gives the call and the backend it takes."""
    problem = Problem.from_tensors(q, k, v, layout)
    program = Program.parse(spec, captured)
    chosen, why = choose(backend, q.device, program, problem)
    if chosen == "reference" and backend == "auto" and q.device.type != "cpu":
        announce(chosen, why)
    check(program, problem, q.device, chosen)
    scale = 1 / math.sqrt(problem.head_dim) if scale is None else scale
    call = analysed(program, problem, layout, scale)
    if chosen != "reference":  # it looks at every index itself
        check_reads(program.graph, lambda: cast(TileMap, call.tiles))
    return call, chosen


def analysed(program: Program, problem: Problem, layout: Layout | None, scale: float) -> Call:
    """A call whose tile map is made when somebody asks for it."""
    analyse = partial(
        tile_map,
        program.graph.mask,
        batch=problem.batch,
        heads=problem.heads_q,
        seqlens_q=problem.seqlens_q,
        seqlens_k=problem.seqlens_k,
    )
    return Call(program, problem, analyse, layout, scale)


#: The kernels of a backend.
SKELETONS = {"sm100": sm100.FORWARD, "sm90": sm90.FORWARD}
BACKWARD = {"sm100": sm100_backward.BACKWARD, "sm90": sm90_backward.BACKWARD}


def prepared(call: Call, chosen: str, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
    """A call of a backend that has kernels, ready to run."""
    return prepare(SKELETONS[family_of(chosen)], call, q, k, v, place_of(chosen, q.device))


def place_of(chosen: str, device: torch.device) -> Place:
    """Where a backend that has kernels runs them."""
    if chosen == "emulator":
        return in_emulator(emulated_target())
    target = target_of(device)
    assert target is not None  # `choose` has seen to it
    return on_device(target, device)


def prepared_once(
    calls: Calls | None,
    key: tuple | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captured: list[Tensor],
    layout: Layout,
    spec: str,
    scale: float | None,
    backend: str,
) -> tuple[Call, Prepared | None]:
    """Plan and prepare a call, and keep it if there is a place; no `Prepared` of the reference."""
    call, chosen = plan_call(q, k, v, captured, layout, spec, scale, backend)
    if chosen == "reference":
        return call, None
    run = prepared(call, chosen, q, k, v)
    if calls is not None and key is not None and can_be_kept(layout, captured):
        calls.keep(key, kept(run, call, layout, q.device))
    return call, run


def gradients_once(
    calls: Calls | None,
    key: tuple | None,
    given: tuple,
    captured: list[Tensor],
    layout: Layout,
    spec: str,
    scale: float | None,
    backend: str,
    deterministic: bool,
) -> Callable[..., Gradients]:
    """What computes the gradients of a call, the reference or prepared kernels, which are kept if
    there is a place.

    Args:
        calls: The place.
        key: What they are found by there.
        given: Gradients of the output and of the LSE (or None), q, k, v, output and LSE.
        captured, layout, spec, scale, backend, deterministic: As of the operator.
    """
    grad_out, grad_lse, q, k, v, out, _ = given
    call, chosen = plan_call(q, k, v, captured, layout, spec, scale, backend)
    output_by = chosen
    chosen, why = gradients_by(backend, chosen, call.program, call.problem)
    if chosen != output_by:
        announce(chosen, why)
    if chosen == "reference":
        return lambda grad_out, grad_lse, q, k, v, out, lse: tiled_backward(
            call, q, k, v, out, lse, grad_out, grad_lse
        )
    skeleton, place = BACKWARD[family_of(chosen)], place_of(chosen, q.device)
    tensors = grad_out, grad_lse, q, k, v, out
    run = prepare_backward(skeleton, call, *tensors, place, deterministic)
    if calls is not None and key is not None and can_be_kept(layout, captured):
        calls.keep(key, kept(run, call, layout, q.device))
    return run


def kernels_of(
    variant: Variant,
    problems: Iterable[Problem],
    target: str,
    scale: float,
    emulated: bool,
    gradients: bool = False,
) -> list[Kernel]:
    """The kernels that calls of a variant need, each once; with gradients, in any order of sums.

    Raises:
        ValueError, IndexError, NotImplementedError: A problem can't be run; with the reason.
    """
    place = Place(target, planned(target).measured.sms, emulated)
    family = next(name for name, kernels in KERNELS.items() if target in kernels.targets)
    skeleton = SKELETONS[family]
    found: dict[str, Kernel] = {}
    for problem in problems:
        call = analysed(variant.program, problem, None, scale)
        check(call.program, problem, torch.device("cpu"), family)
        kernel, _ = kernel_of(skeleton, call, place)
        if kernel is not None:
            found |= {k.key: k for k in (*skeleton.before(call, place), kernel)}
        if gradients:
            gradients_by(family, family, call.program, problem)
            for grad_lse in (False, True):
                kernels = launches(BACKWARD[family], call, place, False, grad_lse)
                found |= {} if kernels is None else {k.key: k for k in kernels.kernels}
    return list(found.values())
