"""The Blackwell backward's own cases: where dQ lies, and what is refused.

What every target's backward must get right is in `tests/backward`.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from emulated import execute

from fa4core import attention
from fa4core.testing import Shape


@pytest.mark.parametrize("dims", [(128, 128), (96, 64), (8, 40)], ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    """dQ over dP, in four parts; in three parts; apart from dP."""
    execute("Variant()", Shape((200,), (300,), 2, 1, *dims), dtype="float16", backward=True)


def test_key_tiles_that_no_query_visits_get_zeros() -> None:
    shape = Shape((100,), (400,), 1, 1, 64, 64)
    execute("Variant(mask=mask.sliding_window(40, 0))", shape, backward=True)


def test_large_head_dims_are_refused_with_the_reason() -> None:
    q, k, v = (torch.randn(1, 20, 1, 192).bfloat16().requires_grad_() for _ in "qkv")
    with pytest.raises(NotImplementedError, match="head dim 192"):
        attention(q, k, v, backend="emulator").sum().backward()
