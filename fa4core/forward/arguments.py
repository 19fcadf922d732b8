"""Captured tensors as kernels take them. Imports no DSL."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from primitives.expr import Capture

Tensor = torch.Tensor


def captured(captures: Iterable[Capture]) -> tuple[Tensor, ...]:
    """Captured tensors in the order of a graph's slots.

    Raises:
        ValueError: An int64 tensor holds what 32 bits don't.
    """
    return tuple(_captured(c.tensor) for c in captures)


def _captured(tensor: Tensor | None) -> Tensor:
    """A captured tensor as the kernel takes it: row-major, at least one element and dimension."""
    assert tensor is not None
    tensor = tensor.detach()
    if tensor.numel() == 0:
        tensor = tensor.new_zeros((1,) * tensor.dim())  # nothing that counts reads it
    if tensor.dtype == torch.int64:
        low, high = (int(n) for n in tensor.aminmax())
        if not -(2**31) <= low <= high < 2**31:
            raise ValueError(
                f"a captured tensor of shape {tuple(tensor.shape)} (int64) holds {low}..{high}; "
                "the kernels compute integers in 32 bits: capture smaller numbers, or use "
                "backend='reference'"
            )
    if tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    # viewed twice, so that dimensions of extent 1 get the stride that row-major tensors have
    return tensor.contiguous().view(-1).view(tensor.shape or (1,))
