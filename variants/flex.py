"""`flex_attention` with torch's signature: change one import, keep the code.

    from variants.flex import flex_attention  # was torch.nn.attention.flex_attention

Mask and score functions are traced on every call, so changed closures are never missed. To trace
once (or to use `torch.compile(fullgraph=True)`), make a `Variant` and call `fa4core.attention`.

Source: Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention
Kernels", 2024.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from fa4core import Variant, attention
from primitives import mask, score
from primitives.sparsity import BlockMap

Tensor = torch.Tensor
ScoreFunction = Callable[..., Tensor]

#: The block size by which torch marks a block mask that masks nothing.
_NO_BLOCKS = 1 << 30


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreFunction | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor | None] | tuple[Tensor, AuxOutput]:
    """Attention with torch's FlexAttention interface.

    Args:
        query: (batch, heads_q, seqlen_q, d).
        key: (batch, heads_kv, seqlen_k, d); a batch of 1 is broadcast if there is a block mask.
        value: (batch, heads_kv, seqlen_k, d_v).
        score_mod: `f(score, b, h, q_idx, kv_idx) -> score`.
        block_mask: torch's `BlockMask`. Blocks in its full lists are attended to in full, those in
            its partial lists where its `mask_mod` says so, all others not at all.
        scale: Factor on q . k; None is 1 / sqrt(d).
        enable_gqa: Allow heads_q to be a multiple of heads_kv.
        return_lse: Return (output, LSE); LSE (batch, heads_q, seqlen_q), natural log.
        kernel_options: Tuning of torch's Triton kernels: has no meaning here and no effect.
        return_aux: What to return besides the output: (output, AuxOutput).

    Raises:
        ValueError: Shapes that don't fit together, or a block mask of other lengths.
    """
    if return_lse and return_aux is not None:
        raise ValueError("return_lse and return_aux were both given; give return_aux only")
    if kernel_options:
        warnings.warn(
            f"kernel_options={kernel_options} tune torch's Triton kernels and have no effect here",
            stacklevel=2,
        )
    _check(query, key, value, enable_gqa, block_mask)
    if key.shape[0] != query.shape[0]:
        key, value = (t.expand(query.shape[0], *t.shape[1:]) for t in (key, value))
    out, lse, row_max = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        variant(score_mod, block_mask),
        scale=scale,
        return_lse=True,
        return_row_max=True,
    )
    out = out.transpose(1, 2)
    if return_aux is not None:
        return out, AuxOutput(
            lse=lse if return_aux.lse else None,
            max_scores=row_max if return_aux.max_scores else None,
        )
    return (out, lse) if return_lse else out


@torch.compiler.disable(reason="make a Variant once and call fa4core.attention with it")
def variant(score_mod: ScoreFunction | None = None, block_mask: BlockMask | None = None) -> Variant:
    """The variant that `flex_attention` computes with these arguments."""
    parts: dict[str, Any] = {}
    if score_mod is not None:
        parts["score"] = score.define(score_mod)
    if block_mask is not None and block_mask.BLOCK_SIZE != (_NO_BLOCKS, _NO_BLOCKS):
        parts["mask"] = mask.define(block_mask.mask_mod)
        parts["blocks"] = block_map(block_mask)
    return Variant(**parts)


def block_map(block_mask: BlockMask) -> BlockMap:
    """The block lists of torch's `BlockMask` as a `BlockMap`."""
    block_q, block_k = block_mask.BLOCK_SIZE
    columns = -(-block_mask.seq_lengths[1] // block_k)
    full = None
    counts, indices = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    if counts is not None and indices is not None:
        full = _dense(counts, indices, columns)
    partial = _dense(block_mask.kv_num_blocks, block_mask.kv_indices, columns)
    return BlockMap(full, partial, block_q, block_k)


def _dense(counts: Tensor, indices: Tensor, columns: int) -> Tensor:
    """bool (batch or 1, heads or 1, blocks_q, columns) of lists of columns with their lengths."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    where = torch.where(listed, indices, columns).long()  # the last column takes the unlisted
    hit = torch.zeros((*indices.shape[:-1], columns + 1), dtype=torch.bool, device=indices.device)
    hit = hit.scatter(-1, where, True)[..., :columns]
    return hit.reshape((1,) * (4 - hit.dim()) + tuple(hit.shape)).contiguous()


def _check(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool, block_mask: BlockMask | None
) -> None:
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)}; (batch, heads, seqlen, d) is accepted"
            )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(
            f"query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True if "
            "query heads share key heads"
        )
    if query.shape[0] != key.shape[0] and (key.shape[0] != 1 or block_mask is None):
        raise ValueError(
            f"query has batch {query.shape[0]} and key {key.shape[0]}; they must agree, or the "
            "keys' be 1 with a block mask"
        )
    if block_mask is None or block_mask.BLOCK_SIZE == (_NO_BLOCKS, _NO_BLOCKS):
        return
    lengths = query.shape[2], key.shape[2]
    if tuple(block_mask.seq_lengths) != lengths:
        raise ValueError(
            f"block_mask is for lengths {tuple(block_mask.seq_lengths)}, but there are "
            f"{lengths[0]} queries and {lengths[1]} keys; make one for these lengths with "
            "create_block_mask"
        )


def main() -> None:
    """Compare with torch's own flex_attention on a small problem and print the difference."""
    from torch.nn.attention import flex_attention as torch_flex

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    q, k, v = (torch.randn(1, 4, 300, 64) for _ in range(3))
    blocks = torch_flex.create_block_mask(causal, None, None, 300, 300, device="cpu")
    ours = flex_attention(q, k, v, block_mask=blocks)
    theirs = torch_flex.flex_attention(q, k, v, block_mask=blocks)
    assert isinstance(ours, Tensor)
    print(f"largest difference from torch's flex_attention: {(ours - theirs).abs().max():.2e}")


if __name__ == "__main__":
    main()
