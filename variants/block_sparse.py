"""Top-k block attention: each query block looks at the key blocks that its router chose.

The router here is MoBA's (arXiv:2502.13189, section 2.2) for whole query blocks: score a mean query
against the mean key of each block, take the best of the past ones, and always the query's own. NSA
(arXiv:2502.11089) and others choose otherwise; any indices do.
"""

from __future__ import annotations

import torch

from fa4core import Variant, draw
from primitives import mask, sparsity


def block_sparse(
    indices: torch.Tensor | None = None,
    *,
    seqlen: int = 8192,
    heads: int = 1,
    top_k: int = 8,
    block: int = 128,
    seed: int = 0,
) -> Variant:
    """Causal attention inside the chosen blocks.

    Args:
        indices: int (blocks, k), (heads_q, blocks, k) or (batch, heads_q, blocks, k): key blocks of
            each query block, -1 for padding. Left out: routed from random queries and keys.
        seqlen: Tokens, a multiple of `block`; queries and keys alike.
        heads: Heads of the random queries and keys.
        top_k: Blocks that a query block looks at, its own included.
        block: Queries and keys in a block.
        seed: Of the random queries and keys.
    """
    if indices is None:
        generator = torch.Generator().manual_seed(seed)
        q, k = torch.randn(2, 1, seqlen, heads, 16, generator=generator)
        indices = route(q, k, top_k, block)
    blocks = sparsity.from_topk(indices, indices.shape[-2], block, block)
    return Variant(mask=mask.causal(), blocks=blocks)


def route(q: torch.Tensor, k: torch.Tensor, top_k: int, block: int = 128) -> torch.Tensor:
    """MoBA's choice for whole query blocks: the best past key blocks and the block itself.

    Args:
        q: (batch, seqlen, heads, head_dim), seqlen a multiple of `block`.
        k: Likewise; repeat the heads of keys for GQA.
        top_k: Blocks to choose, the block itself included.
        block: Tokens in a block.

    Returns:
        int64 (batch, heads, seqlen // block, top_k), -1 where there are fewer past blocks.

    Raises:
        ValueError: A length that is no multiple of `block`, or top_k below 1.
    """
    batch, seqlen, heads, head_dim = q.shape
    if seqlen % block or top_k < 1:
        raise ValueError(
            f"seqlen={seqlen}, block={block}, top_k={top_k}; a seqlen that is a multiple of block "
            "and a top_k of at least 1 are accepted"
        )
    pooled = [x.reshape(batch, -1, block, heads, head_dim).mean(2) for x in (q, k)]
    affinity = torch.einsum("bqhd,bkhd->bhqk", *pooled)
    blocks = affinity.shape[-1]
    order = torch.arange(blocks)
    affinity = affinity.masked_fill(order[None, :] > order[:, None], -torch.inf)
    affinity = affinity.masked_fill(order[None, :] == order[:, None], torch.inf)
    best, indices = affinity.topk(min(top_k, blocks), dim=-1)
    return indices.masked_fill(best == -torch.inf, -1)


def main() -> None:
    """Draw it to `block_sparse.png`."""
    title = "block_sparse: the best 8 blocks of 128"
    draw.variant(block_sparse(seqlen=8192, top_k=8), "block_sparse.png", seqlen=8192, title=title)


if __name__ == "__main__":
    main()
