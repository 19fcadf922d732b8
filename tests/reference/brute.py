"""A tile map made by looking at every element, to test the reference apart from the analysis."""

import numpy as np
import torch

from fa4core.lowering.torch import evaluate


class BruteTiles:
    """Kinds 0, 1, 2 (empty, partial, full) of every tile, by definition."""

    def __init__(self, kinds: dict) -> None:
        self.kinds = kinds  # (b, h) -> (row tiles, column tiles)

    def row(self, b, h, i):
        kinds = self.kinds[b, h][i]
        visited = np.flatnonzero(kinds)
        return visited, kinds[visited]

    def transpose(self):
        return BruteTiles({pair: kinds.T for pair, kinds in self.kinds.items()})


def brute_tiles(mask, *, batch, heads, seqlens_q, seqlens_k, tile_q=128, tile_k=128):
    kinds = {}
    for b in range(batch):
        sq, sk = seqlens_q[b], seqlens_k[b]
        for h in range(heads):
            variables = {
                "b": torch.tensor(b),
                "h": torch.tensor(h),
                "q": torch.arange(sq)[:, None],
                "k": torch.arange(sk),
                "seqlen_q": torch.tensor(sq),
                "seqlen_k": torch.tensor(sk),
            }
            (dense,) = evaluate([mask], variables)
            dense = dense.expand(sq, sk)
            table = np.zeros((-(-sq // tile_q), -(-sk // tile_k)), np.int8)
            for i, j in np.ndindex(*table.shape):
                tile = dense[i * tile_q : (i + 1) * tile_q, j * tile_k : (j + 1) * tile_k]
                table[i, j] = 2 if tile.all() else 1 if tile.any() else 0
            kinds[b, h] = table
    return BruteTiles(kinds)
