"""Block maps whose blocks are not the kernel's tiles, and windows that come at run time."""

from __future__ import annotations

import pytest
import torch
from sampled import one_of

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from emulated import execute

from fa4core import Variant, attention
from fa4core.compile import cache
from fa4core.testing import LayoutSpec, Shape
from primitives import mask, sparsity

LENGTHS = (300, 70), (500, 130)
SEQUSED, VARLEN = LayoutSpec("seqused", slack=5), LayoutSpec("varlen")


LISTS = ("full", "partial", "both")


def blocks(block_q: int, block_k: int, lists: str, per: str = "1, 2") -> str:
    """A variant with a map of (batch or 1, heads or 1, blocks_q, blocks_k) random bits."""
    size = f"{per}, {-(-300 // block_q)}, {-(-500 // block_k)}"
    full = f"bits(1, {size}, density=0.3)" if lists != "partial" else "None"
    partial = f"bits(2, {size}, density=0.4)" if lists != "full" else "None"
    return (
        "Variant(mask=mask.causal() | mask.sink_tokens(3), "
        f"blocks=sparsity.BlockMap({full}, {partial}, {block_q}, {block_k}))"
    )


@pytest.mark.parametrize(
    "lists, block_q, block_k",
    one_of(8, [(n, *b) for n in LISTS for b in ((128, 128), (64, 96), (256, 64))]),
)
def test_full_and_partial_lists_of_any_block_size(lists: str, block_q: int, block_k: int) -> None:
    """The last blocks reach past the sequences, and some sequences end inside the map."""
    layout = VARLEN if lists == "both" else SEQUSED
    execute(blocks(block_q, block_k, lists), Shape(*LENGTHS, 2, 1, 64, 64), layout, num_sms=1)


def test_a_map_for_each_sequence_and_head_with_packed_heads_mods_and_split_keys() -> None:
    given = blocks(96, 32, "both", per="2, 4").removesuffix(")")
    shape = Shape(*LENGTHS, 4, 2, 64, 64)
    for chosen in ("schedule.Schedule(coordinates='packed_gqa')", "schedule.split_kv(3)"):
        variant = f"{given}, score=score.alibi(normal(1, 4, std=0.2)), schedule={chosen})"
        execute(variant, shape, VARLEN, num_sms=2)


def test_topk_blocks_and_maps_that_leave_everything_out() -> None:
    topk = "sparsity.from_topk(integers(1, 5, 2, low=-1, high=8), 8, 64, 64)"
    execute(f"Variant(blocks={topk})", Shape(*LENGTHS, 2, 2, 64, 64), SEQUSED)
    none = "sparsity.from_blocks(bits(1, 3, 4, density=0.0))"
    execute(f"Variant(blocks={none})", Shape(*LENGTHS, 2, 2, 64, 64), SEQUSED)


def test_windows_offsets_and_maps_of_the_same_kind_share_a_kernel() -> None:
    """What changes from call to call is read at run time, and the tile map is made anew."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 300, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    kernels = []
    for window, shift, seed in ((40, 3, 1), (200, -50, 2), (0, -299, 3)):
        bits = torch.rand(5, 7, generator=torch.Generator().manual_seed(seed)) < 0.5
        variant = Variant(
            mask=mask.sliding_window(window, 10).shift(q=shift),
            blocks=sparsity.from_blocks(bits, 64, 48),
        )
        results = [
            attention(q, k, v, variant, return_lse=True, backend=b)
            for b in ("emulator", "reference")
        ]
        torch.testing.assert_close(*results, atol=2e-2, rtol=2e-2)
        kernels.append(cache.statistics().kernels)
    assert kernels == kernels[:1] * 3
