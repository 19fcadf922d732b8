"""Tile maps by brute force: every prebuilt mask, and compositions that Hypothesis finds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import dense_mask

from fa4core.testing import Limits, build, check_tile_map
from fa4core.testing.prebuilt import MASKS
from fa4core.testing.strategies import block_map_sources, mask_sources

LIMITS = Limits(batch=2, heads=2, seqlen_q=150, seqlen_k=200)
LENGTHS = st.lists(
    st.tuples(st.sampled_from([150, 1, 64, 65, 0]), st.sampled_from([200, 1, 128, 127, 0])),
    min_size=1,
    max_size=2,
)
TILES = st.tuples(st.sampled_from([64, 128, 16, 48]), st.sampled_from([64, 128, 16, 24]))
BUDGETS = st.sampled_from([None, 0, 500])

#: Many parameters, so few examples each.
FEW = settings(max_examples=max(6, settings.default.max_examples // 4))


def assert_sound(text: str, lengths, tiles, budget) -> None:
    """The truth comes from `naive`, not from the graph that the analysis saw."""
    dense = [dense_mask(text, b, LIMITS.heads, m, n) for b, (m, n) in enumerate(lengths)]
    found = check_tile_map(
        build(text), heads=LIMITS.heads, seqlens_q=[m for m, _ in lengths],
        seqlens_k=[n for _, n in lengths], tile_q=tiles[0], tile_k=tiles[1], exact_budget=budget,
        dense=dense,
    )  # fmt: skip
    assert found.sound, f"{text} {lengths} {tiles}\n{found}"


@pytest.mark.parametrize("name", MASKS)
@FEW
@given(data=st.data())
def test_prebuilt_mask(name, data):
    text = data.draw(MASKS[name](LIMITS))
    assert_sound(text, data.draw(LENGTHS), data.draw(TILES), data.draw(BUDGETS))


@given(text=mask_sources(LIMITS, depth=3), lengths=LENGTHS, tiles=TILES, budget=BUDGETS)
def test_composed_mask(text, lengths, tiles, budget):
    assert_sound(text, lengths, tiles, budget)


@given(
    blocks=block_map_sources(LIMITS),
    text=mask_sources(LIMITS, depth=1),
    lengths=LENGTHS,
    tiles=TILES,
)
def test_block_map_over_mask(blocks, text, lengths, tiles):
    variant = build(f"Variant(mask={text}, blocks={blocks})")
    found = check_tile_map(
        variant, heads=LIMITS.heads, seqlens_q=[m for m, _ in lengths],
        seqlens_k=[n for _, n in lengths], tile_q=tiles[0], tile_k=tiles[1],
    )  # fmt: skip
    assert found.sound, f"{text} {blocks} {lengths} {tiles}\n{found}"
