"""Gradients against finite differences in float64.

The other checks compare gradients with those of the oracle, which come from torch autograd. This
one needs no autograd: it moves the inputs and looks at the outputs.
"""

from __future__ import annotations

import attrs
import torch

from fa4core.testing.case import Case, Inputs, LayoutSpec, Shape
from fa4core.testing.check import by_backend, run
from fa4core.variant import Variant

Tensor = torch.Tensor

SHAPE, LAYOUT = Shape((5, 9), (7, 4), 2, 1, 8, 8), LayoutSpec("varlen")


@torch.no_grad()
def _loss(inputs: Inputs, backend: str, scale: float | None) -> float:
    """sum(out * grad_out) + sum(lse * grad_lse) over the real rows that attend to something."""
    result = run(by_backend(backend), inputs, scale=scale, backward=False)
    out, lse = result["out"], result["lse"]
    lse = torch.where(lse.isfinite(), lse * inputs.grad_lse, 0.0)
    return float((out * inputs.grad_out.nan_to_num(0.0)).sum() + lse.sum())


def check_gradients(
    variant: Variant,
    *,
    shape: Shape = SHAPE,
    layout: LayoutSpec = LAYOUT,
    backend: str = "auto",
    scale: float | None = None,
    tolerance: float = 1e-4,
    seed: int = 0,
) -> None:
    """Compare the gradients of q, k, v and every learned tensor with finite differences.

    For each tensor a random direction is taken; the derivative along it, extrapolated from steps h
    and h/2 (error of fourth order), must equal the gradient's product with it. Runs in float64;
    captured tensors keep their dtype and are put back.

    Args:
        variant: Smooth in the scores and in its learned tensors.
        shape: Small.
        layout: How sequences lie.
        backend: As `fa4core.attention`; it must take float64.
        scale: Of the scores.
        tolerance: Relative, of a directional derivative.
        seed: Of data and directions.

    Raises:
        AssertionError: Naming the tensors whose gradients are wrong.
    """
    case = Case("...", shape, layout, dtype="float64", seed=seed)
    inputs = case.inputs(variant)
    inputs = attrs.evolve(
        inputs,
        q=inputs.q.detach().nan_to_num(0.0).requires_grad_(),
        k=inputs.k.detach().nan_to_num(0.0).requires_grad_(),
        v=inputs.v.detach().nan_to_num(0.0).requires_grad_(),
    )
    gradients = run(by_backend(backend), inputs, scale=scale)
    tensors = {"dq": inputs.q, "dk": inputs.k, "dv": inputs.v}
    tensors |= {f"d{i}": t for i, t in enumerate(inputs.learned)}
    generator = torch.Generator().manual_seed(seed)
    wrong = []
    for name, tensor in tensors.items():
        direction = torch.randint(-1, 2, tensor.shape, generator=generator).to(tensor.dtype)
        step = 2.0**-6
        coarse, fine = (
            _difference(inputs, tensor, direction, h, backend, scale) for h in (step, step / 2)
        )
        expected = (4 * fine - coarse) / 3
        given = float((gradients[name].double() * direction.double()).sum())
        size = float((gradients[name].double().abs() * direction.double().abs()).sum())
        if not abs(given - expected) <= tolerance * max(size, abs(expected), 1e-6):
            wrong.append(f"{name}: gradient {given:.8g}, finite differences {expected:.8g}")
    if wrong:
        raise AssertionError(f"gradients of {variant.mask!r}, {variant.score!r}: {wrong}")


@torch.no_grad()
def _difference(
    inputs: Inputs,
    tensor: Tensor,
    direction: Tensor,
    step: float,
    backend: str,
    scale: float | None,
) -> float:
    """The central difference of the loss along a direction; `tensor` is put back afterwards."""
    kept = tensor.detach().clone()
    try:
        tensor += step * direction
        above = _loss(inputs, backend, scale)
        tensor -= 2 * step * direction
        below = _loss(inputs, backend, scale)
    finally:
        tensor.copy_(kept)
    return (above - below) / (2 * step)
