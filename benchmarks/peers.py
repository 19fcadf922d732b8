"""Passes of ours and of others on the same tensors, as functions to time.

A contender that can't say a cell's variant, or isn't installed, is left out with the reason.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from measured_cells import Cell, Meaning

from fa4core import attention

Tensors = tuple[torch.Tensor, ...]
Forward = Callable[[], torch.Tensor]


class LeftOut(RuntimeError):
    """Why a contender doesn't take part."""


def ours(cell: Cell, what: Meaning, qkv: Tensors, **options: bool) -> Forward:
    layout = cell.layout()
    return lambda: attention(*qkv, what.ours, layout=layout, backend="sm90", **options)


def fa4(cell: Cell, what: Meaning, qkv: Tensors, **options: bool) -> Forward:
    """FlashAttention-4's own Hopper kernel."""
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    if what.fa4 is None:
        raise LeftOut("has no argument for it")
    given = what.fa4 | options
    if cell.lengths is None:
        return lambda: flash_attn_func(*qkv, **given)[0]
    ends = cell.layout().cu_seqlens_q
    longest = max(cell.lengths)
    return lambda: flash_attn_varlen_func(
        *qkv, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest,
        **given,
    )[0]  # fmt: skip


def flex(cell: Cell, what: Meaning, qkv: Tensors, backend: str) -> Forward:
    """FlexAttention, compiled; its block mask is made once, outside the timing."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if what.flex is None or cell.lengths:
        raise LeftOut("not asked")
    mask_mod, score_mod = what.flex
    q, k, v = (t.transpose(1, 2) for t in qkv)
    block = (256, 128) if backend == "FLASH" else 128
    kept = torch.compile(create_block_mask)(
        mask_mod, None, None, cell.seqlen, cell.seqlen, BLOCK_SIZE=block
    )
    torch._dynamo.reset()
    compiled = torch.compile(
        functools.partial(flex_attention, kernel_options={"BACKEND": backend}), dynamic=False
    )
    return lambda: compiled(q, k, v, score_mod=score_mod, block_mask=kept).transpose(1, 2)


def cudnn(cell: Cell, what: Meaning, qkv: Tensors) -> Forward:
    """cuDNN through torch's scaled_dot_product_attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if what.sdpa is None or cell.lengths:
        raise LeftOut("has no argument for it")
    q, k, v = (t.transpose(1, 2) for t in qkv)

    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = scaled_dot_product_attention(q, k, v, is_causal=what.sdpa)
        return out.transpose(1, 2)

    return run


CONTENDERS: dict[str, Callable[[Cell, Meaning, Tensors], Forward]] = {
    "ours": ours,
    "FA4": fa4,
    "flex FLASH": functools.partial(flex, backend="FLASH"),
    "flex Triton": functools.partial(flex, backend="TRITON"),
    "cuDNN": cudnn,
    "ours deterministic": functools.partial(ours, deterministic=True),
    "FA4 deterministic": functools.partial(fa4, deterministic=True),
}


def backward(forward: Forward, qkv: Tensors, upstream: torch.Tensor) -> Callable[[], Tensors]:
    """The gradients of q, k and v alone: its forward pass runs once, here."""
    torch._functorch.config.donated_buffer = False  # a compiled graph that is run again
    out = forward()
    return lambda: torch.autograd.grad(out, qkv, upstream, retain_graph=True)


ROWS = 1024  # of scores that float32 arithmetic holds at a time


def expected(cell: Cell, what: Meaning, qkv: Tensors, upstream: torch.Tensor | None) -> Tensors:
    """By float32 arithmetic, for the last head of the last sequence: the output, or dQ, dK and dV.

    The mask and the score mod are those of FlexAttention: nothing of ours judges ours.
    """
    q, k, v = (_last(t, cell).detach().float() for t in qkv)
    mask_mod, score_mod = what.flex or (None, None)
    keys = torch.arange(len(k), device=k.device)[None]
    batch, head = (torch.tensor(n - 1, device=k.device) for n in (qkv[0].shape[0], cell.heads))
    out, grads = torch.empty_like(q), tuple(map(torch.zeros_like, (q, k, v)))
    for first in range(0, len(q), ROWS):
        rows = slice(first, first + ROWS)
        leaves = [t.clone().requires_grad_(upstream is not None) for t in (q[rows], k, v)]
        at = torch.arange(first, first + len(leaves[0]), device=k.device)[:, None]
        scores = leaves[0] @ leaves[1].T / math.sqrt(cell.head_dim)
        if score_mod is not None:
            scores = score_mod(scores, batch, head, at, keys)
        if mask_mod is not None:
            scores = scores.masked_fill(~mask_mod(batch, head, at, keys), -torch.inf)
        found = scores.softmax(-1) @ leaves[2]
        out[rows] = found.detach()
        if upstream is not None:
            given = _last(upstream, cell)[rows].float()
            of_q, *others = torch.autograd.grad(found, leaves, given)
            grads[0][rows] = of_q
            for total, share in zip(grads[1:], others, strict=True):
                total.add_(share)
    return (out,) if upstream is None else grads


def _last(tensor: torch.Tensor, cell: Cell) -> torch.Tensor:
    """(seqlen, d) of the last head of the last sequence."""
    rows = tensor[-1] if cell.lengths is None else tensor[-cell.lengths[-1] :]
    return rows[:, -1]


def error(results: torch.Tensor | Tensors, wanted: Tensors, cell: Cell) -> float:
    """The largest of the results' relative distances (Frobenius) from what is `wanted`."""
    given = (results,) if isinstance(results, torch.Tensor) else results
    return max(
        ((_last(got, cell).float() - want).norm() / want.norm()).item()
        for got, want in zip(given, wanted, strict=True)
    )
