"""The custom operators `fa4core::forward` and `fa4core::backward`.

Their arguments are tensors, the list of captured tensors, and one text that holds the variant's
functions and policies (`fa4core.program`): nothing that torch's dispatcher, `torch.compile` or
`torch.export` would have to look into. What needs the values of tensors (lengths, page numbers,
captured indices) is checked when the operator runs; what needs shapes only, when it is traced, too.
`fa4core.attention` is the only caller.
"""

# No `from __future__ import annotations`: torch reads the annotations to make the schemas.

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fa4core.dispatch import gradients_once, prepared_once
from fa4core.kept import known_calls
from fa4core.plan.captured import check_device
from fa4core.prepared import Results
from fa4core.program import Program
from fa4core.recall import PADDED, backward_key_of, key_of
from fa4core.reference.tiled import forward as tiled_forward
from primitives.expr import Capture
from primitives.sequence import Layout


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
        run = gradients_once(calls, key, given, *rest)
    result = run(*given)
    of_captured = []
    for slot in differentiated(spec):
        tensor = captured[slot]  # in two slots it is one capture: its gradient goes to the first
        gradient = result.captured.pop(Capture(tensor), None)
        of_captured.append(tensor.new_zeros(tensor.shape) if gradient is None else gradient)
    return result.q, result.k, result.v, of_captured


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
    ctx: Any,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    _: Tensor | None,
    *,
    originals: tuple[Tensor, ...] = (),
) -> tuple[Any, ...]:
    """Of the forward operator's inputs; `originals` are the captured tensors, if they are known to
    be others than those that were saved."""
    q, k, v, out, lse, *rest = ctx.saved_tensors
    present = sum(ctx.present)
    captured, given = rest[: len(rest) - present], iter(rest[len(rest) - present :])
    captured = list(originals) or captured
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
