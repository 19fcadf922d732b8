"""The custom operators `fa4core::forward` and `fa4core::backward`.

Their arguments are tensors, the list of captured tensors, and one text that holds the variant's
functions and policies (`fa4core.program`): nothing that torch's dispatcher, `torch.compile` or
`torch.export` would have to look into. What needs the values of tensors (lengths, page numbers,
captured indices) is checked when the operator runs; what needs shapes only, when it is traced, too.
`fa4core.attention` is the only caller.
"""

# No `from __future__ import annotations`: torch reads the annotations to make the schemas.

import math
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from fa4core.backends import (
    KERNELS,
    announce,
    check,
    choose,
    family_of,
    gradients_by,
    target_of,
)
from fa4core.backward import launch as backward_launch
from fa4core.backward.prepared import PreparedBackward
from fa4core.backward.prepared import prepare as prepare_backward
from fa4core.compile.kernel import Kernel
from fa4core.kept import Calls, known_calls
from fa4core.places import Place, in_emulator, on_device
from fa4core.plan.captured import check_device
from fa4core.plan.problem import Problem
from fa4core.plan.target import target as planned
from fa4core.plan.tiles import tile_map
from fa4core.prepared import Prepared, Results, kernel_of, prepare
from fa4core.program import Program
from fa4core.recall import PADDED, backward_key_of, can_be_kept, kept, key_of
from fa4core.reference.backward import Gradients
from fa4core.reference.backward import backward as tiled_backward
from fa4core.reference.tiled import Call
from fa4core.reference.tiled import forward as tiled_forward
from fa4core.sm90.backward import launch as sm90_backward
from fa4core.sm90.forward import launch as sm90
from fa4core.sm100.backward import launch as sm100_backward
from fa4core.sm100.forward import launch as sm100
from fa4core.variant import Variant
from primitives.expr import Capture
from primitives.sequence import Layout


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
    return _analysed(program, problem, layout, scale), chosen


def _analysed(program: Program, problem: Problem, layout: Layout | None, scale: float) -> Call:
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
BACKWARD: dict[str, backward_launch.Skeleton] = {
    "sm100": sm100_backward.BACKWARD,
    "sm90": sm90_backward.BACKWARD,
}


def prepared(call: Call, chosen: str, q: Tensor, k: Tensor, v: Tensor) -> Prepared:
    """A call of a backend that has kernels, ready to run."""
    return prepare(SKELETONS[family_of(chosen)], call, q, k, v, place_of(chosen, q.device))


def place_of(chosen: str, device: torch.device) -> Place:
    """Where a backend that has kernels runs them."""
    if chosen == "emulator":
        return in_emulator(family_of(chosen))
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


def kernels_of(
    variant: Variant, problems: Iterable[Problem], target: str, scale: float, emulated: bool
) -> list[Kernel]:
    """The kernels that calls of a variant need, each once.

    Raises:
        ValueError, IndexError, NotImplementedError: A problem can't be run; with the reason.
    """
    place = Place(target, planned(target).measured.sms, emulated)
    family = next(name for name, kernels in KERNELS.items() if target in kernels.targets)
    skeleton = SKELETONS[family]
    found: dict[str, Kernel] = {}
    for problem in problems:
        call = _analysed(variant.program, problem, None, scale)
        check(call.program, problem, torch.device("cpu"), family)
        kernel, _ = kernel_of(skeleton, call, place)
        if kernel is not None:
            found |= {k.key: k for k in (*skeleton.before(call, place), kernel)}
    return list(found.values())


def _operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Define `fa4core::<name>`. Twice as quick to call as one of `torch.library.custom_op`, whose
    wrappers look for mutated and aliased arguments: there are none."""
    name = f"fa4core::{function.__name__}"
    torch.library.define(name, torch.library.infer_schema(function, mutates_args=()))
    torch.library.impl(name, "CompositeExplicitAutograd")(function)
    return function


@_operator
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captured: list[Tensor],
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    page_table: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    spec: str,
    scale: float | None,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and row maximum; see `fa4core.attention` for shapes.

    The statistics are float64 for float32 inputs: the backward pass needs them so exactly. Whether
    gradients are to be deterministic matters to the backward pass only, which gets all arguments.
    """
    given = (
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, max_seqlen_q, max_seqlen_k
    )  # fmt: skip
    layout = PADDED if given == (None,) * len(given) else Layout(*given)
    calls = known_calls(spec, captured)
    key = key_of(q, k, v, layout, scale, backend)
    run = None if calls is None or key is None else calls.find(key)
    if run is None:
        rest = (captured, layout, spec, scale, backend)
        call, run = prepared_once(calls, key, q, k, v, *rest)
    return tiled_forward(call, q, k, v) if run is None else run(q, k, v)


@torch.library.register_fake("fa4core::forward")
def _(
    q: Tensor, k: Tensor, v: Tensor, captured: list[Tensor], *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    for tensor in captured:  # one on "meta" brings a call on real tensors here
        check_device(tensor, q.device)
    statistics = torch.float32 if q.dtype.itemsize == 2 else torch.float64
    rows = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return (
        q.new_empty((*q.shape[:-1], v.shape[-1])),
        q.new_empty(rows, dtype=statistics),
        q.new_empty(rows, dtype=statistics),
    )


@_operator
def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    captured: list[Tensor],
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    page_table: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    spec: str,
    scale: float | None,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of q, k, v and of the captured tensors that `differentiated` names."""
    layout = Layout(
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table, max_seqlen_q, max_seqlen_k
    )
    calls = known_calls(spec, captured)
    key = key_of(q, k, v, layout, scale, backend)
    key = backward_key_of(key, grad_out, grad_lse, out, deterministic)
    run = None if calls is None or key is None else calls.find(key)
    given = grad_out, grad_lse, q, k, v, out, lse
    if run is None:
        rest = captured, layout, spec, scale, backend, deterministic
        run = _backward(calls, key, given, *rest)
    result = run(*given)
    of_captured = []
    for slot in differentiated(spec):
        tensor = captured[slot]  # in two slots it is one capture: its gradient goes to the first
        gradient = result.captured.pop(Capture(tensor), None)
        of_captured.append(tensor.new_zeros(tensor.shape) if gradient is None else gradient)
    return result.q, result.k, result.v, of_captured


def _backward(
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
    """What computes the gradients of a call; kernels are kept if there is a place."""
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
    run: PreparedBackward = prepare_backward(skeleton, call, *tensors, place, deterministic)
    if calls is not None and key is not None and can_be_kept(layout, captured):
        calls.keep(key, kept(run, call, layout, q.device))
    return run


@torch.library.register_fake("fa4core::backward")
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    captured: list[Tensor],
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    spec = next(r for r in rest if isinstance(r, str))
    of_captured = [captured[s].new_empty(captured[s].shape) for s in differentiated(spec)]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_captured


@lru_cache(maxsize=1024)
def differentiated(spec: str) -> list[int]:
    """The slots of captured tensors that receive a gradient, ascending."""
    program = Program.parse(spec)
    entries = program.score_gradient.captured + program.sink_gradient.captured
    wanted = {capture for capture, _, _ in entries}
    return [slot for slot, capture in enumerate(program.captures) if capture in wanted]


_INPUTS = 15  # of the forward operator


def save(ctx: Any, inputs: tuple, output: Results) -> None:
    """Keep for the backward pass what `gradients` needs."""
    q, k, v, captured, *rest = inputs
    out, lse, row_max = output
    layout, ctx.options = rest[:5], rest[5:]
    ctx.present = [t is not None for t in layout]
    ctx.save_for_backward(q, k, v, out, lse, *captured, *(t for t in layout if t is not None))
    if row_max is not None:
        ctx.mark_non_differentiable(row_max)
    ctx.set_materialize_grads(False)


def gradients(
    ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Tensor | None
) -> tuple[Any, ...]:
    """Of the forward operator's inputs."""
    q, k, v, out, lse, *rest = ctx.saved_tensors
    present = sum(ctx.present)
    captured, given = rest[: len(rest) - present], iter(rest[len(rest) - present :])
    layout = [next(given) if there else None for there in ctx.present]
    by_slot: list[Tensor | None] = [None] * len(captured)
    if grad_out is None and grad_lse is None:
        return None, None, None, by_slot, *[None] * (_INPUTS - 4)
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grad_q, grad_k, grad_v, of_captured = torch.ops.fa4core.backward(
        grad_out, grad_lse, q, k, v, out, lse, captured, *layout, *ctx.options
    )
    for slot, gradient in zip(differentiated(ctx.options[2]), of_captured, strict=True):
        by_slot[slot] = gradient
    return grad_q, grad_k, grad_v, by_slot, *[None] * (_INPUTS - 4)


torch.library.register_autograd("fa4core::forward", gradients, setup_context=save)


def _no_second(ctx: Any, *_: Any) -> Any:
    raise RuntimeError(
        "attention has no second derivative: its backward pass can't be differentiated. Call "
        "backward() or torch.autograd.grad without create_graph=True, or differentiate "
        "`fa4core.reference.oracle`, which supports it"
    )


torch.library.register_autograd("fa4core::backward", _no_second)
