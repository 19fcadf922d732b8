"""Tile maps of many masks against brute force: sound, tight, and transposed by transposition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tile_cases import (
    CASES,
    SOUND,
    TIGHT,
    Case,
    brute_force,
    document_ids,
    documents,
    natten_2d,
)

from fa4core.plan.tiles import EMPTY, FULL, PARTIAL, TileMap, tile_map
from primitives.expr.trace import trace

TILES = [(128, 128), (48, 80)]


def analyse(case: Case, tile_q: int, tile_k: int, **options: int) -> TileMap:
    return tile_map(
        trace(case.mask, ("b", "h", "q", "k"), "mask"),
        batch=case.batch,
        heads=case.heads,
        seqlens_q=[case.seqlen_q] * case.batch,
        seqlens_k=[case.seqlen_k] * case.batch,
        tile_q=tile_q,
        tile_k=tile_k,
        **options,
    )


def dense(tiles: TileMap) -> np.ndarray:
    return np.stack(
        [np.stack([tiles.dense(b, h) for h in range(tiles.heads)]) for b in range(tiles.batch)]
    )


def assert_sound(found: np.ndarray, truth: np.ndarray) -> None:
    assert not ((found == EMPTY) & (truth != EMPTY)).any()
    assert not ((found == FULL) & (truth != FULL)).any()


def left_open(found: np.ndarray, truth: np.ndarray) -> float:
    """The share of empty and full tiles that are called partial."""
    decided = truth != PARTIAL
    return float((found[decided] == PARTIAL).mean()) if decided.any() else 0.0


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_brute_force(case: Case, tiles: tuple[int, int]) -> None:
    truth = brute_force(case, *tiles)
    found = analyse(case, *tiles)
    assert_sound(dense(found), truth)
    assert left_open(dense(found), truth) <= 0.02
    assert np.array_equal(dense(found.transpose()), dense(found).swapaxes(2, 3))
    counts = found.counts()
    assert counts == {kind: int((dense(found) == kind).sum()) for kind in (EMPTY, PARTIAL, FULL)}


@pytest.mark.parametrize("budget", [0, 20_000])
@pytest.mark.parametrize("case", [*SOUND, TIGHT[0], TIGHT[8], TIGHT[16]], ids=str)
def test_small_budget_is_sound(case: Case, budget: int) -> None:
    truth = brute_force(case, 64, 64)
    assert_sound(dense(analyse(case, 64, 64, exact_budget=budget)), truth)


@pytest.mark.parametrize("case", TIGHT[:11], ids=str)
def test_bounds_alone_are_tight(case: Case) -> None:
    """No element is evaluated: what is left open stays small for masks of one structure."""
    found = dense(analyse(case, 48, 80, exact_budget=0))
    assert left_open(found, brute_force(case, 48, 80)) <= 0.02


@pytest.mark.parametrize("tiles", [(1, 1), (3, 5), (8, 1000), (1000, 8)], ids=str)
@pytest.mark.parametrize("case", [TIGHT[3], TIGHT[6], TIGHT[14]], ids=str)
def test_unusual_tiles(case: Case, tiles: tuple[int, int]) -> None:
    found, truth = dense(analyse(case, *tiles)), brute_force(case, *tiles)
    assert_sound(found, truth)
    assert left_open(found, truth) <= 0.02


def test_parts_follow_jumps() -> None:
    """Rows of a picture end inside tiles: cutting there decides them from few elements."""
    case = Case("neighbourhood", natten_2d(500, 8, 65, 3), 4000, 4000)
    found = analyse(case, 128, 128, exact_budget=50_000)
    assert np.array_equal(dense(found), brute_force(case, 128, 128))
    bounds = analyse(case, 128, 128, exact_budget=0)
    assert found.counts()[PARTIAL] < bounds.counts()[PARTIAL]


def test_ids_without_order() -> None:
    """Ranges of ids over two documents are wide; that they share no id is seen all the same."""
    offsets = torch.arange(0, 4097, 512) + torch.tensor([0, *([37] * 7), 0])
    case = Case("unsorted", documents((document_ids(offsets) * 5) % 8), 4096, 4096)
    found = analyse(case, 128, 128, exact_budget=0)
    assert np.array_equal(dense(found), brute_force(case, 128, 128))
