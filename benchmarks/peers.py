"""Forward passes of ours and of others on the same tensors, as functions to time.

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


def ours(cell: Cell, what: Meaning, qkv: Tensors) -> Forward:
    layout = cell.layout()
    return lambda: attention(*qkv, what.ours, layout=layout, backend="sm90")


def fa4(cell: Cell, what: Meaning, qkv: Tensors) -> Forward:
    """FlashAttention-4's own Hopper kernel."""
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    if what.fa4 is None:
        raise LeftOut("has no argument for it")
    if cell.lengths is None:
        return lambda: flash_attn_func(*qkv, **what.fa4)[0]
    ends = cell.layout().cu_seqlens_q
    longest = max(cell.lengths)
    return lambda: flash_attn_varlen_func(
        *qkv, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest,
        **what.fa4,
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
}


def error(out: torch.Tensor, cell: Cell, what: Meaning, qkv: Tensors) -> float:
    """Relative distance (Frobenius) of the last 256 rows of a head from float32 arithmetic.

    The mask and the score mod are those of FlexAttention: nothing of ours judges ours.
    """
    q, k, v = (t[-1] if t.dim() == 4 else t[-cell.lengths[-1] :] for t in qkv)
    got = out[-1] if out.dim() == 4 else out[-cell.lengths[-1] :]
    mask_mod, score_mod = what.flex or (None, None)
    rows, head = q.shape[0], q.shape[1] - 1
    at = torch.arange(max(0, rows - 256), rows, device=q.device)[:, None]
    keys = torch.arange(rows, device=q.device)[None]
    scores = q[at[:, 0], head].float() @ k[:, head].float().T / math.sqrt(cell.head_dim)
    batch, which = (torch.tensor(n, device=q.device) for n in (qkv[0].shape[0] - 1, head))
    if score_mod is not None:
        scores = score_mod(scores, batch, which, at, keys)
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(batch, which, at, keys), -torch.inf)
    wanted = scores.softmax(-1) @ v[:, head].float()
    return ((got[at[:, 0], head].float() - wanted).norm() / wanted.norm()).item()
