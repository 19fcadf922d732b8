"""Arguments of the prebuilt masks and score mods: validated, and made run-time scalars and tables.

Numbers become 0-d tensors, which functions capture, so that a new value compiles nothing. Values
are checked where that is free: those of tensors on an accelerator are not read.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Literal

import torch

from primitives.scalar import as_float, parameter

Align = Literal["bottom_right", "top_left"]


def checked_align(align: Align) -> Align:
    if align not in ("bottom_right", "top_left"):
        raise ValueError(f"align={align!r}; accepted are 'bottom_right' and 'top_left'")
    return align


def position(
    q_idx: torch.Tensor, align: Align, seqlen_q: torch.Tensor, seqlen_k: torch.Tensor
) -> torch.Tensor:
    """The key that stands at the query's own place; negative where the queries outnumber them."""
    return q_idx + (seqlen_k - seqlen_q) if align == "bottom_right" else q_idx


def width(value: int | torch.Tensor, what: str, axis: str = "heads") -> torch.Tensor:
    """A run-time integer that must not be negative, or a 1-d table of them."""
    return _integer(value, what, 0, axis)


def size(value: int | torch.Tensor, what: str, axis: str = "heads") -> torch.Tensor:
    """A run-time integer that must be positive, or a 1-d table of them."""
    return _integer(value, what, 1, axis)


def _integer(value: int | torch.Tensor, what: str, least: int, axis: str) -> torch.Tensor:
    accepted = f"an int >= {least}, or an integer tensor of shape () or ({axis},)"
    if isinstance(value, torch.Tensor):
        checked_integers(value, what, (0, 1), accepted)
        if value.device.type == "cpu" and value.numel() and int(value.min()) < least:
            raise ValueError(f"{what} has the value {int(value.min())}; accepted is {accepted}")
        return value
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{what}={value!r}; accepted is {accepted}")
    if value < least:
        raise ValueError(f"{what}={value}; accepted is {accepted}")
    return parameter(value)


def checked_integers(
    value: torch.Tensor, what: str, ranks: Sequence[int], accepted: str
) -> torch.Tensor:
    """An integer tensor of one of the ranks; `accepted` is how errors say so."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what} is a {type(value).__name__}; accepted is {accepted}")
    if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
        raise TypeError(f"{what} is a {value.dtype} tensor; accepted is {accepted}")
    if value.dim() not in ranks:
        raise ValueError(f"{what} has shape {tuple(value.shape)}; accepted is {accepted}")
    return value


def checked_floats(
    value: torch.Tensor, what: str, ranks: Sequence[int], accepted: str
) -> torch.Tensor:
    """A floating-point tensor of one of the ranks; `accepted` is how errors spell the shapes."""
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        given = getattr(value, "dtype", type(value).__name__)
        raise TypeError(f"{what} is {given}; a floating-point tensor {accepted} is accepted")
    if value.dim() not in ranks:
        raise ValueError(f"{what} has shape {tuple(value.shape)}; {accepted} is accepted")
    return value


def number(
    value: float | torch.Tensor, what: str, *, positive: bool = False, axis: str | None = None
) -> torch.Tensor:
    """A run-time float; with `axis` also a 1-d table of them. NaN is refused."""
    if isinstance(value, torch.Tensor):
        forms = "()" if axis is None else f"() or ({axis},)"
        checked_floats(value, what, (0,) if axis is None else (0, 1), forms)
    elif not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{what}={value!r}; a float or a floating-point tensor is accepted")
    else:
        value = parameter(as_float(value, what))
    if value.device.type == "cpu" and not bool(((value > 0) if positive else ~value.isnan()).all()):
        accepted = "a positive number" if positive else "a number"
        raise ValueError(f"{what}={shown(value)}; {accepted} is accepted")
    return value


def at(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The entry of a 1-d table, or the scalar that stands for all of them."""
    return table[index] if table.dim() else table


def shown(value: object) -> str:
    """An argument as the mask's name shows it."""
    if isinstance(value, torch.Tensor) and value.dim():
        return f"tensor{list(value.shape)}"
    if isinstance(value, torch.Tensor):
        return str(value.item()) if value.device.type == "cpu" else "scalar"
    return str(value)
