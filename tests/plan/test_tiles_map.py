"""The tile map as a value: ragged batches, sharing, views, bad input."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from tile_cases import Case, brute_force, causal, documents, lengths, random, window_per_head
from torch.nn.attention.flex_attention import create_mask

from fa4core.plan.tiles import EMPTY, FULL, PARTIAL, TileMap, tile_map
from primitives.expr import Node
from primitives.expr import algebra as A
from primitives.expr.trace import trace

NAMES = ("b", "h", "q", "k")


def traced(mask) -> Node:
    return trace(mask, NAMES, "mask")


def bottom_right(b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
    return q_idx + seqlen_k - seqlen_q >= kv_idx


def build(mask, batch=1, heads=1, q=(300,), k=(300,), **options) -> TileMap:
    return tile_map(traced(mask), batch=batch, heads=heads, seqlens_q=q, seqlens_k=k, **options)


def test_views_agree() -> None:
    offsets = lengths(1000, 7, 2)
    ids = torch.repeat_interleave(torch.arange(7), offsets.diff())
    tiles = build(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), q=(1000,), k=(1000,), tile_q=32)
    dense = tiles.dense(0, 0)
    assert dense.shape == (32, 8) and dense.dtype == np.int8
    for i, row in enumerate(dense):
        columns, kinds = tiles.row(0, 0, i)
        assert columns.dtype == np.int32 and kinds.dtype == np.int8
        assert columns.tolist() == np.flatnonzero(row).tolist()
        assert kinds.tolist() == row[row != EMPTY].tolist()
        spelled = [kind for a, z, kind in tiles.runs(0, 0, i) for _ in range(z - a)]
        assert spelled == kinds.tolist()
    assert tiles.lengths().tolist() == (dense != EMPTY).sum(1).tolist()


def test_runs_are_merged() -> None:
    tiles = build(causal, q=(1 << 16,), k=(1 << 16,))
    assert tiles.runs(0, 0, 300) == [(0, 300, FULL), (300, 301, PARTIAL)]
    assert tiles.transpose().runs(0, 0, 300) == [(300, 301, PARTIAL), (301, 512, FULL)]
    assert tiles.counts() == {EMPTY: 512 * 511 // 2, PARTIAL: 512, FULL: 512 * 511 // 2}


@pytest.mark.parametrize("mask", [causal, bottom_right], ids=["causal", "bottom right"])
def test_unequal_lengths(mask) -> None:
    q, k = (300, 0, 17, 128, 129, 500, 0), (300, 40, 500, 128, 1, 0, 0)
    tiles = build(mask, batch=7, heads=2, q=q, k=k, tile_k=64)
    transposed = tiles.transpose()
    nonempty = []
    for b, (n, m) in enumerate(zip(q, k, strict=True)):
        one = mask
        if mask is bottom_right:
            one = functools.partial(mask, seqlen_q=n, seqlen_k=m)
        truth = np.zeros((-(-n // 128), -(-m // 64)), np.int8)
        if n and m:
            truth = brute_force(Case("", one, n, m), 128, 64)[0, 0]
        for h in range(2):
            assert np.array_equal(tiles.dense(b, h), truth)
            assert np.array_equal(transposed.dense(b, h), truth.T)
            nonempty += (truth != EMPTY).sum(1).tolist()
    assert tiles.lengths().tolist() == nonempty
    assert transposed.tile_q == 64 and transposed.seqlens_q == k
    again = transposed.transpose()
    assert all(np.array_equal(again.dense(b, 0), tiles.dense(b, 0)) for b in range(7))


def test_edge_tiles_are_clipped() -> None:
    tiles = build(lambda b, h, q, k: k < 130, q=(10,), k=(130,))
    assert tiles.runs(0, 0, 0) == [(0, 2, FULL)]
    tiles = build(lambda b, h, q, k: k >= 130, q=(10,), k=(130,))
    assert tiles.runs(0, 0, 0) == []


def test_nothing_at_all() -> None:
    tiles = build(causal, batch=0, heads=3, q=(), k=())
    assert tiles.counts() == {EMPTY: 0, PARTIAL: 0, FULL: 0}
    assert tiles.lengths().tolist() == []
    tiles = build(causal, batch=2, heads=1, q=(0, 0), k=(0, 5))
    assert tiles.dense(1, 0).shape == (0, 1)
    assert tiles.transpose().dense(1, 0).shape == (1, 0)


def stored_runs(tiles: TileMap) -> int:
    return len(tiles._runs.start)


def test_equal_maps_are_stored_once() -> None:
    one = stored_runs(build(causal))
    assert stored_runs(build(causal, batch=3, heads=8, q=[300] * 3, k=[300] * 3)) == one
    windows = torch.tensor([50, 200, 50, 200])
    tiles = build(lambda b, h, q, k: (q - k).abs() < windows[h], heads=4)
    alone = [stored_runs(build(window_per_head(torch.tensor([w - 1])))) for w in (50, 200)]
    assert stored_runs(tiles) == sum(alone)
    assert not np.array_equal(tiles.dense(0, 0), tiles.dense(0, 1))
    assert np.array_equal(tiles.dense(0, 1), tiles.dense(0, 3))
    assert sum(tiles.counts().values()) == 4 * 9
    assert stored_runs(build(causal, batch=3, q=[300, 200, 300], k=[300] * 3)) < 3 * one


def test_storage_is_proportional_to_runs() -> None:
    tiles = build(lambda b, h, q, k: (q >= k) & (q - k < 4096), q=(1 << 20,), k=(1 << 20,))
    assert stored_runs(tiles) < 3.1 * 8192
    assert stored_runs(tiles.transpose()) < 3.1 * 8192


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t().contiguous().t(),
        lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
        lambda t: t.repeat_interleave(2, 0)[::2],
        lambda t: t.to(torch.uint8),
        lambda t: t.to(torch.int64),
        lambda t: t.to(torch.float64).requires_grad_(),
        lambda t: t.to(torch.bfloat16),
        lambda t: t.to(torch.float8_e4m3fn),
    ],
    ids=["transposed", "sliced", "strided", "uint8", "int64", "grad", "bfloat16", "float8"],
)
def test_captured_layouts_and_dtypes(change) -> None:
    given = random((300, 200), 0.002)
    table = change(given)
    tiles = build(lambda b, h, q, k: table[q, k] > 0, k=(200,), tile_q=32, tile_k=32)
    truth = brute_force(Case("", lambda b, h, q, k: given[q, k], 300, 200), 32, 32)[0, 0]
    assert np.array_equal(tiles.dense(0, 0), truth)


def test_expanded_table_and_scalars() -> None:
    row = (torch.arange(300) % 50 < 5).expand(300, 300)
    width = torch.tensor(70)
    tiles = build(lambda b, h, q, k: row[q, k] & (q - k < width), tile_q=16, tile_k=16)
    truth = create_mask(lambda b, h, q, k: row[q, k] & (q - k < 70), 1, 1, 300, 300, device="cpu")
    for i, j in np.ndindex(19, 19):
        tile = truth[0, 0, 16 * i : 16 * i + 16, 16 * j : 16 * j + 16]
        want = FULL if tile.all() else PARTIAL if tile.any() else EMPTY
        assert tiles.dense(0, 0)[i, j] == want


def test_index_outside_does_not_crash() -> None:
    ids = torch.arange(100) // 40
    tiles = build(
        lambda b, h, q, k: (ids[q] == ids[k]) & (q < 100) & (k < 100), tile_q=50, tile_k=50
    )
    dense = tiles.dense(0, 0)
    assert (dense[2:] == EMPTY).all() and (dense[:, 2:] == EMPTY).all()  # & false is false
    tiles = build(lambda b, h, q, k: ids[q] == ids[k], tile_q=50, tile_k=50)
    assert (tiles.dense(0, 0)[2:] == PARTIAL).all()  # nothing is known there


def test_millions_of_hopeless_tiles_stay_partial() -> None:
    """A mask without structure: sound, and given up on before every tile is looked at."""
    noise = torch.randint(0, 50, (1 << 18,), generator=torch.Generator().manual_seed(0))
    tiles = build(documents(noise), q=(1 << 18,), k=(1 << 18,))
    assert tiles.counts()[PARTIAL] == 2048 * 2048
    assert stored_runs(tiles) == 2048


def test_bad_input() -> None:
    mask = traced(causal)
    sizes = {"batch": 2, "heads": 1, "seqlens_q": [4, 4], "seqlens_k": [4, 4]}
    with pytest.raises(TypeError, match="kind int"):
        tile_map(A.add(A.var("q"), A.var("k")), **sizes)
    with pytest.raises(TypeError, match="function"):
        tile_map(causal, **sizes)
    with pytest.raises(ValueError, match="score"):
        tile_map(A.less(A.var("score"), 0.0), **sizes)
    with pytest.raises(ValueError, match="seqlens_k needs 2 lengths"):
        tile_map(mask, **(sizes | {"seqlens_k": [4]}))
    with pytest.raises(ValueError, match="seqlens_q"):
        tile_map(mask, **(sizes | {"seqlens_q": [4, -1]}))
    with pytest.raises(ValueError, match="tile_q=0"):
        tile_map(mask, **sizes, tile_q=0)
    tiles = tile_map(mask, **sizes)
    for where in [(2, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0)]:
        with pytest.raises(IndexError, match="query tile"):
            tiles.runs(*where)
