"""Backward kernels as `Subject`s: ours, and FlashAttention-4's with one CTA and with two.

A work tile is a tile of keys here, and its blocks are of queries. Output and LSE of the forward
pass are made up: what a backward kernel executes does not depend on numbers.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest import mock

import attrs
import torch

from fa4core.emulator.session import Session, emulator
from fa4core.plan.problem import Problem
from fa4core.reference.tiled import Call
from fa4core.report.peer import fa4_arguments, fa4_asked_anew, import_fa4
from fa4core.timing.peer import emulated, pairs
from fa4core.timing.subject import Run, Subject, built_with_lines, largest, small_problem, tensors
from fa4core.variant import Variant
from primitives.schedule import Schedule


def ours(variant: Variant, problem: Problem, target: str, ctas: int | None = None) -> Subject:
    """Our backward kernel for a call.

    Args:
        ctas: That share a work tile; what the call gets unless given.

    Raises:
        NotImplementedError, ValueError: There is none, or it is not modelled.
    """
    from fa4core.backward.launch import schedule_of
    from fa4core.backward.support import refusal
    from fa4core.dispatch import BACKWARD
    from fa4core.report.pipeline import call_for

    _check(problem)
    if reason := refusal(variant.program, problem):
        raise NotImplementedError(f"the backward kernels do not take this call: {reason}")
    skeleton = BACKWARD["sm90" if target == "sm90" else "sm100"]
    call = call_for(variant, problem, target)
    if ctas is not None:
        schedule = attrs.evolve(schedule_of(call), ctas=ctas)
        variant = attrs.evolve(variant, schedule=schedule)
        call = call_for(variant, problem, target)
    schedule = schedule_of(call)
    spec = skeleton.spec_of(call, target, False)
    if ctas not in (None, spec.ctas):
        raise NotImplementedError(
            f"no backward kernel for this call has {ctas} CTAs a work tile; it has {spec.ctas}"
        )

    def run(queries: int, keys: int, heads: int, sms: int) -> Run:
        small = small_problem(problem, queries, keys, heads, 1)
        return _run_ours(skeleton, call_for(variant, small, target), target, sms)

    return Subject(
        title=_title("ours", ctas),
        run=run,
        schedule=schedule,
        rows=spec.keys * spec.side,
        ctas=spec.ctas,
        block=spec.queries,
        backward=True,
    )


def _check(problem: Problem) -> None:
    if problem.group > 1:
        raise NotImplementedError(
            f"{problem.group} query heads for each KV head; backward passes are modelled with as "
            "many KV heads as query heads"
        )
    if problem.starts_q is not None or problem.starts_k is not None:
        raise NotImplementedError(
            "packed sequences; backward passes are modelled with tensors that have a batch"
        )


def _title(whose: str, ctas: int | None) -> str:
    return whose if ctas is None else f"{whose}, {ctas} CTA{'s' if ctas > 1 else ''}"


def _run_ours(skeleton: Any, call: Call, target: str, sms: int) -> Run:
    from fa4core.backward.launch import launches
    from fa4core.backward.prepared import prepare
    from fa4core.compile import cache
    from fa4core.places import Place, in_emulator

    found = launches(skeleton, call, Place(target, sms, True), False, False)
    if found is None:
        raise ValueError("no query and no key to attend to: such a call launches nothing")
    _, *main, _ = found.kernels
    if len(main) > 1:
        raise NotImplementedError(
            f"head dims {call.problem.head_dim} and {call.problem.head_dim_v}: the backward pass "
            f"is {len(main)} launches; one is modelled"
        )
    package = built_with_lines(*main)
    cache.add(package)
    with emulator(target, seed=1, detect="none", num_sms=sms, record=False, trace=True) as session:
        q, k, v, out, grad_out, lse = _made_up(call.problem)
        given = grad_out, None, q, k, v, out
        prepare(skeleton, call, *given, in_emulator(target), False)(*given, lse)
    return largest(session, package.cubin)


def fa4(variant: Variant, problem: Problem, target: str, ctas: int | None = None) -> Subject:
    """FlashAttention-4's backward kernel for a call.

    Args:
        ctas: That share a work tile; what its package takes unless given.

    Raises:
        ModuleNotFoundError, NotImplementedError: It is not installed, or can't do it.
    """
    arguments = fa4_arguments(variant)
    left, right = arguments.pop("window_size", (None, None))
    arguments |= {"window_size_left": left, "window_size_right": right}
    interface = import_fa4()
    _check(problem)
    if max(problem.head_dim, problem.head_dim_v) > 192:
        raise NotImplementedError(
            f"head dims {problem.head_dim} and {problem.head_dim_v}: FlashAttention-4's backward "
            "pass is modelled up to 192, where it is one kernel"
        )
    rows, block = 128, 128
    if target == "sm90":
        tile = interface._tile_size_bwd_sm90(
            problem.head_dim, problem.head_dim_v, "causal" in arguments, left is not None
        )
        rows, block = tile.n_block_size, tile.m_block_size
    pairs = target != "sm90" and problem.head_dim >= 128  # as its package has it
    if ctas == 2 and not pairs:
        raise NotImplementedError("FlashAttention-4 has pairs of CTAs from head dim 128 on")
    used = ctas or (2 if pairs else 1)
    kernels: dict[str, dict] = defaultdict(dict)

    def run(queries: int, keys: int, heads: int, sms: int) -> Run:
        small = small_problem(problem, queries, keys, heads, 1)
        with _backward(interface, target, sms, used, kernels) as session:
            q, k, v, out, grad_out, lse = _made_up(small)
            interface._flash_attn_bwd(q, k, v, out, grad_out, lse, **arguments)
        return largest(session)

    return Subject(
        title=_title("fa4", ctas),
        run=run,
        # In the order of the grid, whose first tile of keys has most to do.
        schedule=Schedule(source="one_tile", order="in_order", l2_sections=False, ctas=used),
        rows=rows * used,
        ctas=used,
        block=block,
        backward=True,
    )


@contextlib.contextmanager
def _backward(
    interface: Any, target: str, sms: int, ctas: int, kernels: dict[str, dict]
) -> Iterator[Session]:
    """FlashAttention-4's backward pass runs in the emulator, and keeps its kernels here."""
    with contextlib.ExitStack() as stack:
        for name in ("_bwd_preprocess", "_flash_attn_bwd", "_bwd_postprocess_convert"):
            function = getattr(interface, name)
            stack.enter_context(mock.patch.object(function, "compile_cache", kernels[name]))
        stack.enter_context(pairs(interface, ctas))
        stack.enter_context(fa4_asked_anew())
        yield stack.enter_context(emulated(target, sms))


def _made_up(p: Problem) -> tuple[torch.Tensor, ...]:
    """q, k, v, output, its gradient, and LSE."""
    q, k, v = tensors(p)
    generator = torch.Generator().manual_seed(1)
    shape = (*q.shape[:-1], p.head_dim_v)
    out, grad_out = (torch.randn(shape, generator=generator).to(p.dtype) for _ in range(2))
    lse = torch.full((1, p.heads_q, p.seqlens_q[0]), 6.0)
    return q, k, v, out, grad_out, lse
