"""Inputs as they come: expanded, misaligned, transposed, every second column; and mixtures."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from emulated import execute

from fa4core import Variant, attention
from fa4core.compile import cache
from fa4core.testing import LayoutSpec, Shape

SHAPE = Shape((150,), (200,), 4, 2, 64, 64)


@pytest.mark.parametrize("strides", ["expanded", "misaligned", "heads_first", "sliced"])
def test_strides_of_the_testing_kit(strides: str) -> None:
    execute("Variant(mask=mask.causal())", SHAPE, strides=strides)
    execute("Variant(mask=mask.causal())", SHAPE, LayoutSpec("varlen"), strides=strides, seed=1)


def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    results = [attention(q, k, v, Variant(), backend=b) for b in ("emulator", "reference")]
    torch.testing.assert_close(*results, atol=2e-2, rtol=2e-2)


def test_all_kinds_share_a_kernel() -> None:
    """Expanded over sequences, heads or rows; odd columns; an odd address; row-major."""
    torch.manual_seed(0)
    q = torch.randn(2, 20, 4, 64, dtype=torch.bfloat16)
    k = torch.randn(2, 140, 4, 64, dtype=torch.bfloat16)
    wide = torch.randn(2, 140, 4, 129, dtype=torch.bfloat16)
    both(q, k, k)
    kernels = cache.statistics().kernels
    both(q, k[:1].expand(2, 140, 4, 64), k[:, :, :1].expand(2, 140, 4, 64))
    both(q, k[:, :1].expand(2, 140, 4, 64), k[:1, :, :1].expand(2, 140, 4, 64))
    both(q, wide[..., :128:2], wide[..., 1:65])
    both(q[:, :, :1].expand(2, 20, 4, 64), k.transpose(1, 2).contiguous().transpose(1, 2), k)
    both(q[:1].expand(2, 20, 4, 64), k, k)
    both(q, k, k)
    assert cache.statistics().kernels == kernels


def test_expanded_pages() -> None:
    from primitives import sequence

    torch.manual_seed(0)
    q = torch.randn(1, 5, 2, 64, dtype=torch.bfloat16)
    pool = torch.randn(3, 16, 1, 64, dtype=torch.bfloat16).expand(3, 16, 2, 64)
    layout = sequence.paged(torch.tensor([[2, 0]]), torch.tensor([30], dtype=torch.int32))
    results = [
        attention(q, pool, pool, Variant(), layout=layout, backend=b)
        for b in ("emulator", "reference")
    ]
    torch.testing.assert_close(*results, atol=2e-2, rtol=2e-2)
