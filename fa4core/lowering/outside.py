"""What is said of an index that is outside the captured tensor it reads. Used by `torch` and by
`fa4core.plan.captured`."""

from __future__ import annotations

from primitives.expr import Node


def outside(gather: Node, dim: int, low: int, high: int, problem: str = "") -> IndexError:
    """The error of an index that runs over low..high; `problem` are the sizes it comes from."""
    tensor = gather.attr.tensor
    size = tensor.shape[dim]
    accepted = f"0..{size - 1} (and -{size}..-1, from its end)" if size else "none, as it is empty"
    whose = f" for {problem}" if problem else ""
    return IndexError(
        f"dimension {dim} of a captured tensor of shape {tuple(tensor.shape)} ({tensor.dtype}) has "
        f"size {size}; accepted are indices {accepted}, but `{gather.args[dim]}` runs over "
        f"{low}..{high}{whose}; enlarge the tensor, or clamp the index"
    )
