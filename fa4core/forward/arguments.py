"""What kernels are compiled for and what they take, on any target. Imports no DSL."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from fa4core.forward.coordinates import packing
from fa4core.plan.roofline import needs_mufu
from fa4core.plan.target import target as planned
from fa4core.prepared import Shape
from fa4core.reference.tiled import Call
from fa4core.spec import LEAST_SCALE
from primitives.expr import Capture
from primitives.schedule import Schedule

Tensor = torch.Tensor


def compiled_for(
    call: Call, target: str, schedule: Schedule, tile: int, block: int
) -> dict[str, Any]:
    """The fields of a `ForwardSpec`.

    Args:
        call: The call.
        target: Name of the target.
        schedule: Of the call.
        tile: Rows of a query tile.
        block: Keys of a block.
    """
    problem, program, hardware = call.problem, call.program, planned(target)
    threshold = program.rescale_threshold
    return compiled_for_either(call, target) | {
        "graph": program.graph.dump(),
        "exp": program.exp
        or hardware.exp(max(problem.head_dim, problem.head_dim_v), needs_mufu(program.graph.score)),
        "threshold": hardware.rescale_threshold if threshold is None else float(threshold),
        "packed": packing(program, problem, tile),
        "page_rows": 0 if problem.page_size is None else math.gcd(problem.page_size, block),
        "split": schedule.num_splits > 1,
    }


def compiled_for_either(call: Call, target: str) -> dict[str, Any]:
    """The fields of a `KernelSpec` that are the same in both passes."""
    problem = call.problem
    return {
        "dtype": str(problem.dtype).removeprefix("torch."),
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "negative_scale": call.scale < LEAST_SCALE,
        "target": target,
    }


def pages(call: Call) -> tuple[Tensor, ...]:
    """A page table (batch, pages) int32 with at least one column, if keys are in pages."""
    if call.layout is None or call.layout.page_table is None:
        return ()
    table = call.layout.page_table.to(torch.int32)
    return (table.contiguous() if table.numel() else table.new_zeros(len(table), 1),)


def of_shares(count: int, out: Shape, rows: Shape) -> tuple[Shape, ...]:
    """Shapes of output, LSE and row maximum of each share of the keys, float32; none of one."""
    if count == 1:
        return ()
    return tuple((count * shape[0], *shape[1:]) for shape in (out, rows, rows))


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
