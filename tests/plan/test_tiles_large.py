"""A million tokens: tiles drawn at random, and at the edges of runs, against their elements."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tile_cases import (
    MaskFunction,
    block_diffusion,
    causal,
    document_ids,
    lengths,
    local,
    natten_2d,
    packed_causal,
    tiled_natten,
)

from fa4core.plan.tiles import EMPTY, FULL, PARTIAL, TileMap, tile_map
from primitives.expr.trace import trace

LENGTH = 1 << 20
TILE = 128
OFFSETS = lengths(LENGTH, 300, 0)
IDS = document_ids(OFFSETS)


def windowed_documents(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 4096) & (IDS[q_idx] == IDS[kv_idx])


MASKS = {
    "causal, window, documents": windowed_documents,
    "local causal documents": local(causal, OFFSETS),
    "packed causal documents": packed_causal(OFFSETS),
    "block diffusion": block_diffusion(LENGTH // 2, 100),
    "tiled neighbourhood": tiled_natten(1024, 1024, 65, 8),
    "neighbourhood": natten_2d(1000, 1048, 13, 13),
}


def kind_of(mask: MaskFunction, i: int, j: int) -> int:
    q = torch.arange(i * TILE, min((i + 1) * TILE, LENGTH))[:, None]
    k = torch.arange(j * TILE, min((j + 1) * TILE, LENGTH))[None]
    values = mask(torch.tensor(0), torch.tensor(0), q, k)
    return FULL if values.all() else PARTIAL if values.any() else EMPTY


def kind_at(tiles: TileMap, i: int, j: int) -> int:
    return next((kind for a, z, kind in tiles.runs(0, 0, i) if a <= j < z), EMPTY)


@pytest.mark.parametrize("name", MASKS)
def test_sampled_tiles(name: str) -> None:
    mask = MASKS[name]
    tiles = tile_map(
        trace(mask, ("b", "h", "q", "k"), "mask"),
        batch=1,
        heads=1,
        seqlens_q=[LENGTH],
        seqlens_k=[LENGTH],
    )
    transposed = tiles.transpose()
    rng = np.random.default_rng(0)
    wrong = left_open = decided = 0
    for i in rng.integers(tiles.tiles_q(0), size=40).tolist():
        near = [x for a, z, _ in tiles.runs(0, 0, i) for x in (a - 1, a, z - 1, z)]
        for j in {*near, *rng.integers(tiles.tiles_k(0), size=4).tolist()}:
            if not 0 <= j < tiles.tiles_k(0):
                continue
            called, real = kind_at(tiles, i, j), kind_of(mask, i, j)
            assert kind_at(transposed, j, i) == called
            wrong += called not in (PARTIAL, real)
            decided += real != PARTIAL
            left_open += real != PARTIAL == called
    assert wrong == 0
    assert left_open <= 0.02 * decided
