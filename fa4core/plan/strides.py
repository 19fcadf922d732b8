"""How tensors lie in memory: which can be read in place by a kernel, and their stride class.

Kernels load tiles by TMA, which asks for a contiguous last dimension, 16-byte aligned rows and a
16-byte aligned start (CUDA driver API, `cuTensorMapEncodeTiled`). Any other tensor is accepted and
copied first; `explain` says so, and the compile key contains the class, not the strides.
"""

from __future__ import annotations

import torch

ALIGNMENT = 16  # bytes


def copy_reason(tensor: torch.Tensor, queries: bool = False) -> str | None:
    """Why a kernel can't read the tensor in place; None if it can.

    Dimensions of size 1 have no stride that matters. Heads and sequences that keys and values are
    expanded over (stride 0) are read in place: TMA is shown one entry, which serves every index.

    Args:
        tensor: (..., rows, heads, d).
        queries: Whether it is q, whose heads may be packed with its rows into one tile.
    """
    if tensor.numel() == 0:
        return None
    sizes, strides, item = tensor.shape, tensor.stride(), tensor.element_size()
    if sizes[-1] > 1 and strides[-1] != 1:
        return f"its last dimension has stride {strides[-1]}, not 1"
    rows = tensor.dim() - 3
    for dim in range(tensor.dim() - 1):
        if sizes[dim] > 1 and strides[dim] == 0 and (queries or dim == rows):
            return f"dimension {dim} is expanded (stride 0)"
        if sizes[dim] > 1 and strides[dim] * item % ALIGNMENT:
            return (
                f"dimension {dim} has a stride of {strides[dim] * item} bytes, no multiple of "
                f"{ALIGNMENT}"
            )
    if tensor.data_ptr() % ALIGNMENT:
        return f"it starts {tensor.data_ptr() % ALIGNMENT} bytes off a {ALIGNMENT}-byte boundary"
    return None


def stride_class(tensor: torch.Tensor, queries: bool = False) -> str:
    """How a kernel takes the tensor: "copied", or which dimensions are broadcast."""
    if copy_reason(tensor, queries) is not None:
        return "copied"
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return "".join("0" if size > 1 and stride == 0 else "s" for size, stride in pairs)
