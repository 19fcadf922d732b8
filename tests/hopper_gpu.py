"""Whether this machine has a Hopper GPU, and how a test's tensors get there."""

from __future__ import annotations

from typing import Any

import torch

GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def on_gpu(given: Any) -> Any:
    """An argument there, or a list of them; tensors keep their strides."""
    if isinstance(given, list):
        return [on_gpu(each) for each in given]
    if not isinstance(given, torch.Tensor):
        return given
    storage = given.detach().untyped_storage().cuda()  # whole: no stride or offset changes
    there = torch.empty(0, dtype=given.dtype, device="cuda")
    return there.set_(storage, given.storage_offset(), given.shape, given.stride())
