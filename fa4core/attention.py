"""`attention`: the public entry point."""

from __future__ import annotations

import math

import torch
from torch.autograd import forward_ad

from fa4core.compile.aot import Exported
from fa4core.dispatch import prepared_once
from fa4core.prepared import Results
from fa4core.recall import PADDED, is_open, key_of, wants_grad
from fa4core.recorded import Recorded
from fa4core.variant import Variant, place_of_part
from primitives.scalar import as_float
from primitives.sequence import Layout
from primitives.wording import typed

Tensor = torch.Tensor

_FULL = Variant()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variant | Exported | None = None,
    *,
    layout: Layout | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    return_row_max: bool = False,
    backend: str = "auto",
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Attention of a variant: `softmax(score(scale * q . k), over mask) v`.

    One function serves padded, packed and paged tensors, with a `layout` that says where the
    sequences lie: the layout is orthogonal to the variant, which sees only positions inside a
    sequence, so a function for each layout would only multiply the signatures.

    Differentiable in q, k, v, in captured floating-point tensors of score mods and sinks, and
    through the log-sum-exp; once (no second derivative). Works under
    `torch.compile(fullgraph=True)` if the variant is made outside the compiled function.

    Args:
        q: Queries (batch, seqlen_q, heads_q, d), or packed (total_q, heads_q, d). float16,
            bfloat16, float32 or float64; any strides.
        k: Keys (batch, seqlen_k, heads_kv, d), packed (total_k, heads_kv, d), or in pages
            (num_pages, page_size, heads_kv, d). heads_q is a multiple of heads_kv (GQA, MQA).
        v: Values, as k with their own d_v.
        variant: What to compute; None is full attention. Also what `fa4core.compile.load` gives.
        layout: From `primitives.sequence`: `varlen(...)`, `paged(...)`, `fixed(...)`; None for
            padded tensors without padding.
        scale: Factor on q . k; None is 1 / sqrt(d).
        return_lse: Also return the log-sum-exp of the modified scores, sink included.
        return_row_max: Also return the maximum of the modified scores, without the sink. It has no
            gradient.
        backend: "auto", "sm100", "sm90", "reference" or "emulator". "auto" takes the kernels of the
            device where there are some and the reference otherwise, and says so on a GPU.
        deterministic: Ask for gradients that are the same bit by bit in every run. The reference's
            always are; kernels add up in a fixed order then, which takes longer.

    Returns:
        The output, as q with d_v, in q's dtype; or a tuple of it, the log-sum-exp if asked for and
        the row maximum if asked for. Both have shape (batch, heads_q, seqlen_q), packed (heads_q,
        total_q), in natural units, float32 (float64 for float64 inputs). A row with nothing to
        attend to has output 0 and both at -inf (the log-sum-exp is the sink where there is one),
        and so have rows behind `seqused_q`.

    Raises:
        TypeError, ValueError, IndexError, NotImplementedError: Saying what was given, what is
            accepted and what to do.
    """
    variant = _FULL if variant is None else variant
    layout = PADDED if layout is None else layout
    if not type(return_lse) is type(return_row_max) is type(deterministic) is bool:
        _check_flags(
            return_lse=return_lse, return_row_max=return_row_max, deterministic=deterministic
        )
    open_ = is_open(q, k, v, variant, layout, scale)
    key = key_of(q, k, v, layout, scale, backend) if open_ else None
    prepared = None if key is None else variant.calls.find(key)
    if prepared is None:
        _check_types(q, k, v, variant, layout, scale, backend)
        if key is not None:
            rest = (variant.arguments, layout, variant.spec, scale, backend)
            _, prepared = prepared_once(variant.calls, key, q, k, v, *rest)
    if prepared is None:
        results = _operator(q, k, v, variant, layout, scale, backend, deterministic)
    elif wants_grad(q, k, v, variant.arguments):
        options = _options(variant, layout, scale, backend, deterministic)
        results = Recorded.apply(prepared, return_row_max, options, q, k, v, *variant.arguments)
    else:
        results = prepared(q, k, v, return_lse, return_row_max)
    out, lse, row_max = results
    if return_lse:
        return (out, lse, row_max) if return_row_max else (out, lse)
    return (out, row_max) if return_row_max else out


def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variant | Exported,
    layout: Layout,
    scale: float | None,
    backend: str,
    deterministic: bool,
) -> Results:
    """The call as an operator that torch can see: differentiated, compiled, exported."""
    out, lse, row_max = torch.ops.fa4core.forward(
        q,
        k,
        v,
        variant.arguments,
        *_options(variant, layout, scale, backend, deterministic),
    )
    if q.dtype == torch.float32:  # the operator keeps them exact for the backward pass
        lse, row_max = lse.float(), row_max.float()
    return out, lse, row_max


def _options(
    variant: Variant | Exported,
    layout: Layout,
    scale: float | None,
    backend: str,
    deterministic: bool,
) -> tuple:
    """The operator's arguments after the captured tensors."""
    return (
        layout.cu_seqlens_q,
        layout.cu_seqlens_k,
        layout.seqused_q,
        layout.seqused_k,
        layout.page_table,
        layout.max_seqlen_q,
        layout.max_seqlen_k,
        variant.spec,
        None if scale is None else float(scale),
        backend,
        deterministic,
    )


def _check_flags(**flags: bool) -> None:
    """Of calls that are found again, too: they are found by shapes and strides alone."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} is {flag!r}; a bool is accepted")


def _check_types(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variant | Exported,
    layout: Layout,
    scale: float | None,
    backend: str,
) -> None:
    """What can be checked without the values of tensors; the operator checks the rest."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is {typed(tensor)}; a torch tensor is accepted")
    given = {"q": q, "k": k, "v": v} | (layout.tensors if isinstance(layout, Layout) else {})
    for name, tensor in given.items():
        # Before torch's dispatcher sees them: it runs no kernel at all if one is a meta tensor.
        if tensor.device != q.device:
            raise ValueError(
                f"q is on {q.device} and {name} on {tensor.device}; move them to one device"
            )
    if q.device.type == "meta":
        raise ValueError(
            "q, k and v are meta tensors, which hold no values; attention needs tensors on a real "
            "device (torch.compile and torch.export trace it without values)"
        )
    if not isinstance(variant, Variant | Exported):
        raise TypeError(f"variant is {typed(variant)}; a Variant is accepted{_hint(variant)}")
    if not isinstance(layout, Layout):
        raise TypeError(
            f"layout is {typed(layout)}; a primitives.sequence.Layout is accepted, from "
            "sequence.fixed, sequence.varlen or sequence.paged"
        )
    if isinstance(scale, Tensor):
        raise TypeError(
            "scale is a tensor; a float is accepted. A learned scale is a score mod: "
            "score.define(lambda s, b, h, q_idx, kv_idx: s * t[h])"
        )
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, float | int)):
        raise TypeError(f"scale is {typed(scale)}; a float or None is accepted")
    if scale is not None and not math.isfinite(as_float(scale, "scale")):
        raise ValueError(f"scale={scale}; a finite number is accepted")
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        _check_tangents(q, k, v, *variant.arguments)
    if not isinstance(backend, str):
        raise TypeError(f"backend is {backend!r}; a str is accepted, such as 'auto'")
    for tensor, constant in zip(variant.arguments, variant.constant, strict=True):
        if constant and tensor.requires_grad:
            raise ValueError(
                f"a captured tensor of shape {tuple(tensor.shape)} requires grad, but did not when "
                "the score mod or sink was defined, so its derivative is not known; call "
                ".requires_grad_() before defining it"
            )


def _hint(variant: object) -> str:
    """What to write instead of something that is no variant."""
    if isinstance(variant, Layout):
        return "; pass it as layout=..."
    if (place := place_of_part(variant)) is not None:
        return f"; make one with {place}"
    if callable(variant):
        return "; wrap it: Variant(mask=mask.define(f)) or Variant(score=score.define(f))"
    return ""


def _check_tangents(*tensors: Tensor) -> None:
    """Forward-mode derivatives would be zero: torch asks no custom operator for them."""
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError(
            "attention has no forward-mode derivative (torch.func.jvp, forward_ad); take "
            "backward() or torch.autograd.grad, or differentiate `fa4core.reference.oracle`, which "
            "supports it"
        )
