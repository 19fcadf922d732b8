"""Soundness and tightness of tile maps, by brute force over every element.

A tile map may call a tile EMPTY only if the mask is false on all of it, and FULL only if it is true
on all of it, inside the sequence. `check_tile_map` evaluates the mask on every element and counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from fa4core.lowering.torch import evaluate
from fa4core.plan.tiles import EMPTY, FULL, PARTIAL, tile_map
from fa4core.testing.dense import indices
from fa4core.variant import Variant
from primitives.expr import Node
from primitives.mask import Mask

Tensor = torch.Tensor


@attrs.frozen
class TileCheck:
    """What a check found.

    Attributes:
        tiles: Tiles looked at.
        uniform: Of those, the ones that are really empty or full.
        left_open: Of those, the ones that are called PARTIAL.
        errors: Tiles called EMPTY with a true element or FULL with a false one.
    """

    tiles: int = 0
    uniform: int = 0
    left_open: int = 0
    errors: tuple[str, ...] = ()

    @property
    def sound(self) -> bool:
        return not self.errors

    @property
    def looseness(self) -> float:
        """Share of the really empty or full tiles that are left PARTIAL."""
        return self.left_open / self.uniform if self.uniform else 0.0

    def __str__(self) -> str:
        text = f"{self.tiles} tiles, {self.left_open} of {self.uniform} uniform ones left PARTIAL"
        if self.errors:
            shown = "\n    ".join(self.errors[:5])
            text = f"tile map WRONG: {len(self.errors)} tiles\n    {shown}\n  {text}"
        return text


def truth(mask: Node, b: int, heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The mask on every element: bool (heads, seqlen_q, seqlen_k)."""
    (value,) = evaluate([mask], indices(b, heads, seqlen_q, seqlen_k))
    return value.expand(heads, seqlen_q, seqlen_k)


def tile_kinds(values: Tensor, tile_q: int, tile_k: int) -> Tensor:
    """int64 (heads, tiles_q, tiles_k): what each tile of a dense mask really is."""
    any_true, any_false = (_pooled(x, tile_q, tile_k) for x in (values, ~values))
    return torch.where(any_true & any_false, PARTIAL, torch.where(any_true, FULL, EMPTY))


def _pooled(values: Tensor, tile_q: int, tile_k: int) -> Tensor:
    heads, rows, columns = values.shape
    tiles_q, tiles_k = -(-rows // tile_q), -(-columns // tile_k)
    padded = torch.zeros(heads, tiles_q * tile_q, tiles_k * tile_k, dtype=torch.bool)
    padded[:, :rows, :columns] = values
    return padded.reshape(heads, tiles_q, tile_q, tiles_k, tile_k).any(4).any(2)


def check_tile_map(
    mask: Mask | Variant | Node,
    *,
    heads: int = 1,
    seqlens_q: Sequence[int] = (300,),
    seqlens_k: Sequence[int] = (300,),
    tile_q: int = 128,
    tile_k: int = 128,
    exact_budget: int | None = None,
    dense: Sequence[Tensor] | None = None,
) -> TileCheck:
    """Compare the tile map of a mask, and its transpose, with the mask on every element.

    Args:
        mask: A mask, or a variant (its block map included).
        heads: Query heads.
        seqlens_q, seqlens_k: Lengths of each sequence.
        tile_q, tile_k: Sizes of a tile.
        exact_budget: Elements that the analysis may evaluate; 0 tests the bounds alone.
        dense: The truth of each sequence, bool (heads, seqlen_q, seqlen_k), if known from
            elsewhere; default: evaluating the mask's graph.

    Returns:
        What was found; `sound` says whether the map is right.
    """
    node = _node(mask)
    options = {} if exact_budget is None else {"exact_budget": exact_budget}
    found = tile_map(
        node, batch=len(seqlens_q), heads=heads, seqlens_q=seqlens_q, seqlens_k=seqlens_k,
        tile_q=tile_q, tile_k=tile_k, **options,
    )  # fmt: skip
    turned = found.transpose()
    total = TileCheck()
    for b, (m, n) in enumerate(zip(seqlens_q, seqlens_k, strict=True)):
        values = truth(node, b, heads, m, n) if dense is None else dense[b]
        real = tile_kinds(values, tile_q, tile_k)
        for h in range(heads):
            called = torch.from_numpy(found.dense(b, h)).long()
            total = _add(total, f"b={b} h={h}", called, real[h])
            if not torch.equal(torch.from_numpy(turned.dense(b, h)).long(), called.T):
                error = f"b={b} h={h}: the transposed map is another"
                total = attrs.evolve(total, errors=(*total.errors, error))
    return total


def _node(mask: Mask | Variant | Node) -> Node:
    if isinstance(mask, Variant):
        return mask.graph.mask
    return mask.expr if isinstance(mask, Mask) else mask


def _add(total: TileCheck, where: str, called: Tensor, real: Tensor) -> TileCheck:
    if called.shape != real.shape:
        error = f"{where}: {tuple(called.shape)} tiles; there are {tuple(real.shape)}"
        return attrs.evolve(total, errors=(*total.errors, error))
    names = {EMPTY: "EMPTY", PARTIAL: "PARTIAL", FULL: "FULL"}
    wrong = ((called != PARTIAL) & (called != real)).nonzero().tolist()
    errors = [
        f"{where} tile ({i}, {j}) is {names[int(real[i, j])]}, called {names[int(called[i, j])]}"
        for i, j in wrong
    ]
    uniform = real != PARTIAL
    return TileCheck(
        tiles=total.tiles + real.numel(),
        uniform=total.uniform + int(uniform.sum()),
        left_open=total.left_open + int((uniform & (called == PARTIAL)).sum()),
        errors=(*total.errors, *errors),
    )
