"""Keys and values in pages, among unused pages full of NaN."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from both import execute, on_both

from fa4core import Variant, attention
from fa4core.emulator.session import emulator
from fa4core.sm100.forward.protocol import check_forward
from fa4core.sm100.forward.spec import Spec
from fa4core.testing import LayoutSpec, Shape
from primitives import sequence

LENGTHS = (140, 3, 0, 20), (300, 1, 130, 0)


@on_both("page_size", [8, 16, 48, 128, 256, 384], sm100=[8, 256], sm90=[8])
def test_pages_of_any_size(target: str, page_size: int) -> None:
    """Smaller than a block, not a divisor of it, one or several blocks long."""
    layout = LayoutSpec("paged", page_size=page_size)
    execute(target, "Variant()", Shape(*LENGTHS, 2, 1, 64, 64), layout, seed=page_size, num_sms=1)


@on_both()
def test_pages_with_packed_queries_masks_and_other_head_dims(target: str) -> None:
    variant = "Variant(mask=mask.causal() & mask.sliding_window(100, 0))"
    layout = LayoutSpec("paged_varlen", page_size=16)
    for seed, strides in enumerate(("contiguous", "sliced", "heads_first")):
        shape = Shape(*LENGTHS, 2, 2, 128, 72)
        execute(target, variant, shape, layout, seed=seed, num_sms=1 + seed, strides=strides)


@on_both(sm90=False)
def test_decoding_from_pages_with_packed_heads(target: str) -> None:
    variant = "Variant(schedule=schedule.Schedule(coordinates='packed_gqa'))"
    execute(
        target, variant, Shape((1, 1), (300, 17), 8, 1, 64, 64), LayoutSpec("paged", page_size=32)
    )


@on_both(sm90=False)
def test_a_page_may_serve_several_sequences_and_tables_may_be_longer(target: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 5, 2, 64, dtype=torch.bfloat16)
    pool = torch.randn(4, 16, 2, 64, dtype=torch.bfloat16)
    table = torch.tensor([[2, 1, 99], [2, 3, -7]])  # what is behind the end names no page
    layout = sequence.paged(table, torch.tensor([30, 20], dtype=torch.int32))
    with emulator(target):
        results = [
            attention(q, pool, pool, Variant(), layout=layout, backend=backend)
            for backend in ("emulator", "reference")
        ]
    torch.testing.assert_close(*results, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("target", ["sm100", "sm90"])
def test_pages_without_a_whole_swizzle_atom_are_refused(target: str) -> None:
    q, pool = torch.zeros(1, 5, 1, 64).bfloat16(), torch.zeros(4, 12, 1, 64).bfloat16()
    layout = sequence.paged(torch.tensor([[2, 1]]), torch.tensor([20], dtype=torch.int32))
    with emulator(target), pytest.raises(NotImplementedError, match=r"page size 12.*multiple of 8"):
        attention(q, pool, pool, Variant(), layout=layout, backend="emulator")


@pytest.mark.parametrize("page_rows", [8, 128])
def test_the_protocol_is_safe(page_rows: int) -> None:
    for blocks in ((3, 0, 2), (1, 1, 4)):
        check_forward(Spec("", "bfloat16", 64, 64, page_rows=page_rows), blocks)
