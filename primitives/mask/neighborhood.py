"""Neighbourhood attention on 1-, 2- and 3-dimensional canvases (NATTEN)."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from primitives.mask.core import Mask, named
from primitives.scalar import parameter

_AXES = ("first", "second", "third")


@attrs.frozen(eq=False)
class _Axis:
    """One axis of the canvas; sizes are run-time scalars, None for a dilation or stride of 1."""

    length: torch.Tensor
    kernel: torch.Tensor
    dilation: torch.Tensor | None
    stride: torch.Tensor | None
    causal: bool

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Whether coordinate `k` lies in the neighbourhood of coordinate `q`."""
        length = self.length
        same_group = None
        if self.dilation is not None:
            group = q % self.dilation
            same_group = k % self.dilation == group
            length = (length - group + self.dilation - 1) // self.dilation
            q, k = q // self.dilation, k // self.dilation
        inside = self._window(q, k, length)
        return inside if same_group is None else inside & same_group

    def _window(self, q: torch.Tensor, k: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        leader = q
        if self.stride is not None:  # queries of a group share the window of their leader
            inner = self.stride - 1 if self.causal else self.stride // 2
            leader = torch.minimum(q // self.stride * self.stride + inner, length - 1)
        if self.causal:
            return (k <= q) & (k > leader - self.kernel)
        start = (leader - self.kernel // 2).clamp(min=0)
        start = torch.minimum(start, length - self.kernel)
        return (k >= start) & (k < start + self.kernel)


def natten(
    canvas: int | Sequence[int],
    kernel: int | Sequence[int],
    dilation: int | Sequence[int] = 1,
    stride: int | Sequence[int] = 1,
    causal: bool | Sequence[bool] = False,
) -> Mask:
    """A query attends to the `kernel` nearest keys along each axis of a canvas.

    Tokens are the row-major positions of a 1-, 2- or 3-dimensional canvas. The window is centred on
    the query and pushed inside at the edges, so that every query sees the same number of keys; an
    even kernel looks one further to the left. Sizes are run-time: new ones compile nothing, except
    that a dilation or stride of 1 is compiled as such.

    (Neighbourhood attention, Hassani et al., arXiv:2204.07143; dilated, arXiv:2209.15001; causal
    axes, arXiv:2403.04690; strides, generalized neighbourhood attention, arXiv:2504.16922.)

    Args:
        canvas: Length of each axis, e.g. `(height, width)`; an int for one axis.
        kernel: Keys of the neighbourhood along each axis; an int for all axes.
        dilation: Distance of neighbours along each axis; kernel * dilation <= length.
        stride: Queries in a row that share the window of their middle one (causal: last one).
        causal: Axes along which a query doesn't look ahead.

    Raises:
        ValueError: Sizes below 1, a kernel that doesn't fit its axis, a stride above the kernel,
            or arguments for another number of axes.
    """
    lengths = (canvas,) if isinstance(canvas, int) else tuple(canvas)
    if not 1 <= len(lengths) <= 3:
        raise ValueError(f"canvas={canvas}; one, two or three axes are accepted")
    names = ("canvas", "kernel", "dilation", "stride")
    sizes = [
        _per_axis(name, value, len(lengths))
        for name, value in zip(names, (lengths, kernel, dilation, stride), strict=True)
    ]
    ahead = _per_axis("causal", causal, len(lengths))
    axes = [_axis(i, *row) for i, row in enumerate(zip(*sizes, ahead, strict=True))]

    def natten_mask(b, h, q_idx, kv_idx):
        inside: torch.Tensor | None = None
        for axis in reversed(axes[1:]):
            here = axis(q_idx % axis.length, kv_idx % axis.length)
            inside = here if inside is None else here & inside
            q_idx, kv_idx = q_idx // axis.length, kv_idx // axis.length
        first = axes[0](q_idx, kv_idx)
        return first if inside is None else first & inside

    text = "x".join(map(str, sizes[0])) + ", " + "x".join(map(str, sizes[1]))
    return named(f"natten({text})", natten_mask)


def _per_axis(name: str, value: int | bool | Sequence, rank: int) -> tuple:
    values = (value,) * rank if isinstance(value, int) else tuple(value)
    if len(values) != rank:
        raise ValueError(f"{name}={value} has {len(values)} entries for a canvas of {rank} axes")
    kind = bool if name == "causal" else int
    for v in values:
        if not isinstance(v, kind) or (kind is int and (isinstance(v, bool) or v < 1)):
            accepted = "bools" if kind is bool else "ints >= 1"
            raise ValueError(f"{name}={value}; {accepted} are accepted, one or one for each axis")
    return values


def _axis(i: int, length: int, kernel: int, dilation: int, stride: int, causal: bool) -> _Axis:
    if kernel * dilation > length:
        raise ValueError(
            f"on the {_AXES[i]} axis kernel {kernel} x dilation {dilation} exceeds the length "
            f"{length}; it must fit"
        )
    if stride > kernel:
        raise ValueError(
            f"on the {_AXES[i]} axis stride {stride} exceeds kernel {kernel}; queries would not "
            "see themselves"
        )
    return _Axis(
        length=parameter(length),
        kernel=parameter(kernel),
        dilation=None if dilation == 1 else parameter(dilation),
        stride=None if stride == 1 else parameter(stride),
        causal=causal,
    )
