"""No TMA box outside its tensor: an H200 may answer one with an illegal address."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core import Variant, attention
from fa4core.emulator.session import emulator
from primitives import mask, sequence

SWEEP = pytest.mark.sweep


@pytest.mark.parametrize(
    "dims",
    [(40, 200), *(pytest.param(d, marks=SWEEP) for d in [(8, 256), (8, 8), (256, 200), (72, 24)])],
    ids=str,
)
def test_every_box_has_a_part_of_its_tensor(dims: tuple[int, int]) -> None:
    """Packed, so that tiles stick out behind sequences, too."""
    torch.manual_seed(0)
    ends = torch.tensor([0, 70, 71, 200], dtype=torch.int32)
    sizes = [(200, 2, dims[0]), (200, 1, dims[0]), (200, 1, dims[1])]
    leaves = [torch.randn(size).bfloat16().requires_grad_() for size in sizes]
    with emulator("sm90", num_sms=2) as session:
        out = attention(
            *leaves, Variant(mask=mask.causal()), layout=sequence.varlen(ends), backend="emulator"
        )
        out.float().sum().backward()
    assert len(session.statistics) == 4
    assert [s.bytes.get("tma.outside", 0) for s in session.statistics] == [0] * 4
    assert session.statistics[0].bytes["tma.load"]
