"""Masks by blocks of positions: chunks, causal blocks, block diffusion."""

from __future__ import annotations

import torch

from primitives.arguments import Align, at, checked_align, position, shown, size
from primitives.mask.core import Mask, named


def chunked(chunk: int | torch.Tensor, align: Align = "bottom_right") -> Mask:
    """A query attends to the keys of its own chunk: a block-diagonal mask.

    `chunked(8192) & causal()` is Llama 4's local attention.

    Args:
        chunk: Positions in a chunk, >= 1, run-time; or (heads_q,), each head its own.
        align: As in `causal`: which position a query has if the lengths differ.

    Raises:
        ValueError, TypeError: A chunk below 1, or no integer.
    """
    length = size(chunk, "chunk")
    checked_align(align)

    def chunked_mask(b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
        own = position(q_idx, align, seqlen_q, seqlen_k)
        return own // at(length, h) == kv_idx // at(length, h)

    return named(f"chunked({shown(chunk)})", chunked_mask)


def block_causal(block: int | torch.Tensor, align: Align = "bottom_right") -> Mask:
    """A query attends to all of its own block and to the blocks before it.

    Args:
        block: Positions in a block, >= 1, run-time; or (heads_q,), each head its own.
        align: As in `causal`.

    Raises:
        ValueError, TypeError: A block below 1, or no integer.
    """
    length = size(block, "block")
    checked_align(align)

    def block_causal_mask(b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
        own = position(q_idx, align, seqlen_q, seqlen_k)
        return kv_idx // at(length, h) <= own // at(length, h)

    return named(f"block_causal({shown(block)})", block_causal_mask)


def block_diffusion(block: int | torch.Tensor, length: int | torch.Tensor | None = None) -> Mask:
    """The training mask of block diffusion: noised tokens first, then the same tokens clean.

    A noised token attends to the noised tokens of its block and to the clean tokens of the blocks
    before; a clean token attends to the clean tokens of its block and of those before
    (BD3-LM, Arriola et al., arXiv:2503.09573, section 3.1: block-diagonal, offset block-causal and
    block-causal parts).

    Args:
        block: Tokens in a diffusion block, >= 1, run-time.
        length: Length of the clean sequence, run-time: positions below it are noised. None: half
            of the keys.

    Raises:
        ValueError, TypeError: A block or a length below 1, or no integer.
    """
    tokens = size(block, "block")
    clean_length = None if length is None else size(length, "length")

    def block_diffusion_mask(b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
        half = seqlen_k // 2 if clean_length is None else at(clean_length, b)
        q_noised, k_noised = q_idx < half, kv_idx < half
        q_block = torch.where(q_noised, q_idx, q_idx - half) // at(tokens, h)
        k_block = torch.where(k_noised, kv_idx, kv_idx - half) // at(tokens, h)
        diagonal = q_noised & k_noised & (q_block == k_block)
        offset_block_causal = q_noised & ~k_noised & (q_block > k_block)
        causal_blocks = ~q_noised & ~k_noised & (q_block >= k_block)
        return diagonal | offset_block_causal | causal_blocks

    return named(f"block_diffusion({shown(block)})", block_diffusion_mask)
