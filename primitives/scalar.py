"""Run-time scalars: numbers that a kernel takes as arguments instead of compiling them in."""

from __future__ import annotations

import numbers

import torch

from primitives.wording import brief


def parameter(value: bool | int | float | torch.Tensor) -> torch.Tensor:
    """Wrap a number so that functions capture it as a run-time argument.

    A plain Python number in a closure is part of the function and compiled in; a parameter may
    change from call to call without compiling anything.

    Args:
        value: The number; a 0-d tensor is taken as it is.

    Returns:
        A 0-d tensor on the CPU: int64, float32 or bool.

    Raises:
        TypeError: `value` is neither a number nor a 0-d tensor.
        ValueError: An int that doesn't fit into 64 bits.
    """
    if isinstance(value, torch.Tensor):
        if value.dim() != 0:
            raise TypeError(
                f"a parameter is one number; got a tensor of shape {tuple(value.shape)}"
            )
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)  # numpy's integers too
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{brief(value)} does not fit into 64 bits; -2^63 to 2^63 - 1 do")
    if not isinstance(value, bool | int | float):
        raise TypeError(f"a parameter is a bool, int, float or 0-d tensor; got {value!r}")
    dtype = {bool: torch.bool, int: torch.int64}.get(type(value), torch.float32)
    return torch.tensor(value, dtype=dtype, device="cpu")


def as_float(value: float, what: str) -> float:
    """A number as a float.

    Raises:
        ValueError: An int beyond a float's range.
    """
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{what}={brief(value)}; at most 1.8e308 is accepted") from None
