"""Block maps: which blocks of queries and keys are attended to at all.

A block map is two boolean matrices over blocks: blocks attended to in full, and blocks in which
the variant's mask decides. It is no second mechanism: `BlockMap.apply` writes it as a mask, and
the tile analysis finds the empty and full tiles in it as in any mask, whatever the block sizes.
"""

from __future__ import annotations

import attrs
import torch

from primitives.expr import Node, algebra
from primitives.expr.node import Capture
from primitives.mask.core import Mask


@attrs.frozen(eq=False)
class BlockMap:
    """Blocks of `block_q` queries by `block_k` keys.

    Attributes:
        full: bool (batch or 1, heads or 1, blocks_q, blocks_k): attended to in full, without the
            variant's mask. None: no block.
        partial: Likewise: the variant's mask decides. None: no block.
        block_q: Queries in a block; need not equal the kernel's tile.
        block_k: Keys in a block.
    """

    full: torch.Tensor | None
    partial: torch.Tensor | None
    block_q: int = 128
    block_k: int = 128

    def __attrs_post_init__(self) -> None:
        if self.full is None and self.partial is None:
            raise ValueError("a block map needs full blocks, partial blocks, or both; got neither")
        for name in ("block_q", "block_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}; a positive int is accepted")
        for name in ("full", "partial"):
            if (matrix := getattr(self, name)) is not None:
                _check_matrix(name, matrix)
        if self.full is not None and self.partial is not None:
            full, partial = tuple(self.full.shape), tuple(self.partial.shape)
            if full[2:] != partial[2:]:
                raise ValueError(
                    f"full has {full[2]} x {full[3]} blocks and partial {partial[2]} x "
                    f"{partial[3]}; they must agree"
                )

    def apply(self, mask: Mask) -> Mask:
        """The mask that block map and `mask` amount to together: full | (partial & mask)."""
        allowed = algebra.FALSE
        if self.full is not None:
            allowed = self._lookup(self.full)
        if self.partial is not None:
            decided = algebra.logical_and(self._lookup(self.partial), mask.expr)
            allowed = algebra.logical_or(allowed, decided)
        return Mask(allowed, f"blocks({mask.name})")

    def _lookup(self, matrix: torch.Tensor) -> Node:
        b = algebra.const(0) if matrix.shape[0] == 1 else algebra.var("b")
        h = algebra.const(0) if matrix.shape[1] == 1 else algebra.var("h")
        i = algebra.floordiv(algebra.var("q"), self.block_q)
        j = algebra.floordiv(algebra.var("k"), self.block_k)
        return algebra.gather(Capture(matrix), (b, h, i, j))


def _check_matrix(name: str, matrix: torch.Tensor) -> None:
    if not isinstance(matrix, torch.Tensor) or matrix.dtype != torch.bool or matrix.dim() != 4:
        given = type(matrix).__name__
        if isinstance(matrix, torch.Tensor):
            given = f"{matrix.dtype} of shape {tuple(matrix.shape)}"
        raise TypeError(
            f"{name} is {given}; a bool tensor of shape (batch or 1, heads or 1, blocks_q, "
            "blocks_k) is accepted"
        )


def _four_dimensional(blocks: torch.Tensor) -> torch.Tensor:
    if blocks.dim() not in (2, 3, 4):
        raise ValueError(
            f"a block matrix of shape {tuple(blocks.shape)}; (blocks_q, blocks_k), "
            "(heads, blocks_q, blocks_k) or (batch, heads, blocks_q, blocks_k) is accepted"
        )
    return blocks.reshape((1,) * (4 - blocks.dim()) + tuple(blocks.shape))


def from_blocks(blocks: torch.Tensor, block_q: int = 128, block_k: int = 128) -> BlockMap:
    """Attend to a block where `blocks` is true; inside it the variant's mask decides.

    Args:
        blocks: bool (blocks_q, blocks_k), (heads, blocks_q, blocks_k) or
            (batch, heads, blocks_q, blocks_k), any strides.
        block_q: Queries in a block.
        block_k: Keys in a block.

    Raises:
        TypeError, ValueError: Another dtype or rank, or a block size below 1.
    """
    return BlockMap(None, _four_dimensional(blocks), block_q, block_k)


def from_topk(
    indices: torch.Tensor, num_blocks_k: int, block_q: int = 128, block_k: int = 128
) -> BlockMap:
    """Attend to the key blocks named for each query block; the variant's mask decides inside.

    Args:
        indices: integer (blocks_q, k), (heads, blocks_q, k) or (batch, heads, blocks_q, k): key
            blocks of each query block; negative ones are padding. Repeated ones count once.
        num_blocks_k: Number of key blocks.
        block_q: Queries in a block.
        block_k: Keys in a block.

    Raises:
        TypeError, ValueError: Another dtype or rank, or an index that is not below `num_blocks_k`.
    """
    if not isinstance(indices, torch.Tensor):
        raise TypeError(f"indices is a {type(indices).__name__}; an integer tensor is accepted")
    if indices.dtype.is_floating_point or indices.dtype == torch.bool:
        raise TypeError(f"indices is {indices.dtype}; an integer tensor is accepted")
    if indices.dim() not in (2, 3, 4):
        raise ValueError(
            f"indices has shape {tuple(indices.shape)}; (blocks_q, k), (heads, blocks_q, k) or "
            "(batch, heads, blocks_q, k) is accepted"
        )
    if num_blocks_k < 1:
        raise ValueError(f"num_blocks_k={num_blocks_k}; at least 1 is accepted")
    if indices.numel() and int(indices.max()) >= num_blocks_k:
        raise ValueError(
            f"indices names key block {int(indices.max())}; blocks 0..{num_blocks_k - 1} exist"
        )
    shape = (*indices.shape[:-1], num_blocks_k + 1)
    hit = torch.zeros(shape, dtype=torch.bool, device=indices.device)
    hit.scatter_(-1, torch.where(indices < 0, num_blocks_k, indices).long(), True)
    return from_blocks(hit[..., :num_blocks_k], block_q, block_k)
