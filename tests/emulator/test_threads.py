"""The emulator and the DSL's settings belong to the process: threads take turns."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core import Variant, attention
from fa4core.emulator.session import emulator
from primitives import mask


@pytest.mark.parametrize("inside", [False, True])
def test_calls_from_several_threads(inside: bool) -> None:
    """With a session of their own each, and in one that another thread has opened."""
    q, k, v = (torch.randn(1, 40, 2, 16).bfloat16() for _ in range(3))
    variant = Variant(mask=mask.causal())
    expected = attention(q, k, v, variant, backend="reference")
    found: list[torch.Tensor] = []

    def calls() -> None:
        for _ in range(2):
            found.append(attention(q, k, v, variant, backend="emulator"))

    with emulator(num_sms=2) if inside else contextlib.nullcontext():
        threads = [threading.Thread(target=calls) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 6
    for out in found:
        torch.testing.assert_close(out, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("num_sms", [0, -1, 1.5])
def test_a_number_of_sms_that_is_none_is_refused(num_sms) -> None:
    with pytest.raises(ValueError, match=r"num_sms=.*a positive int"), emulator(num_sms=num_sms):
        pass
