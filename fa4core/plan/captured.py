"""Captured tensors against a problem: are they where, and as large as, the call needs them?

What can be told from sizes is told here, before anything is computed: a per-head table that is too
short, a sink of another length, a block map or document ids too small for the sequence. Indices
that depend on data are checked where they are evaluated. What a score mod reads depends on the
mask: `check_reads` looks at the tiles that are attended to as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fa4core.lowering.outside import outside
from fa4core.plan.problem import Problem
from fa4core.plan.tiles import TileMap
from fa4core.program import VariantGraph
from primitives.expr import Node, walk
from primitives.wording import counted

Range = tuple[Any, Any]  # least and greatest: ints, or arrays of several ranges

_COUNTS = {
    "b": ("sequence",),
    "h": ("query head",),
    "q": ("query", "queries"),
    "k": ("key",),
}


def check_captured(graph: VariantGraph, problem: Problem, device: torch.device) -> None:
    """Check the tensors a variant captured.

    Raises:
        ValueError: On another device than the queries, or a sink of the wrong length.
        IndexError: Too small for the heads, sequences, queries or keys of the problem.
    """
    if min(problem.batch, problem.heads_q) == 0:
        return
    sink = graph.sink
    if sink.op == "gather" and len(sink.args) == 1 and sink.args[0].attr == "h":
        length = sink.attr.tensor.shape[0]
        if length != problem.heads_q:
            raise ValueError(
                f"the sink has {counted(length, 'logit')} for "
                f"{counted(problem.heads_q, 'query head')}; one each"
            )
    sizes = {
        "b": problem.batch,
        "h": problem.heads_q,
        "q": max(problem.seqlens_q),
        "k": max(problem.seqlens_k),
    }
    ranges = {name: (0, size - 1) for name, size in sizes.items()}
    everywhere = set(walk(graph.mask, graph.sink))  # evaluated for every query (and key) there is
    for node in walk(*graph.roots):
        if node.op != "gather":
            continue
        if node.attr.tensor is not None:
            check_device(node.attr.tensor, device)
        for dim, index in enumerate(node.args):
            if node in everywhere or not index.free & {"q", "k"}:
                _check_size(node, dim, index, ranges, sizes)


def check_device(tensor: torch.Tensor, device: torch.device) -> None:
    """Raise unless a captured tensor is on `device` or a scalar on the CPU."""
    if tensor.device == device or (tensor.dim() == 0 and tensor.device.type == "cpu"):
        return
    raise ValueError(
        f"a captured tensor of shape {tuple(tensor.shape)} ({tensor.dtype}) is on {tensor.device} "
        f"and the queries on {device}; move it to {device} before defining the mask or score mod"
    )


def check_reads(graph: VariantGraph, tiles: Callable[[], TileMap]) -> None:
    """Check what the score mod reads of captured tensors on FULL tiles, where every pair counts.

    On other tiles kernels read the nearest element instead of one outside. `tiles` makes the map
    of the variant's mask, if there is anything to check.

    Raises:
        IndexError: A tensor is too small.
    """
    nodes = [n for n in walk(graph.score) if n.op == "gather" and n.attr.tensor is not None]
    found = [
        (node, dim, index)
        for node in nodes
        for dim, index in enumerate(node.args)
        if index.free and index.free <= {"q", "k"}
    ]
    if not found:
        return
    ranges = tiles().full_ranges()
    if not len(ranges["q"][0]):
        return
    for node, dim, index in found:
        _check_size(node, dim, index, ranges, {})


def _check_size(
    node: Node, dim: int, index: Node, ranges: Mapping[str, Range], sizes: dict[str, int]
) -> None:
    bounds = _bounds(index, ranges)
    tensor = node.attr.tensor
    if bounds is None or tensor is None:
        return
    low, high = (int(end) for end in (np.min(bounds[0]), np.max(bounds[1])))
    size = tensor.shape[dim]
    if low > high or (-size <= low and high < size):
        return
    used = " and ".join(
        counted(sizes[v], *_COUNTS[v])
        for v in ("b", "h", "q", "k")
        if v in index.free and sizes.get(v)
    )
    raise outside(node, dim, low, high, used)


def _bounds(index: Node, ranges: Mapping[str, Range]) -> Range | None:
    """Least and greatest value of an index, where its form is simple enough to be exact."""
    if index.op == "const":
        return index.attr, index.attr
    if index.op == "var" and index.attr in ranges:
        return ranges[index.attr]
    if index.op == "floordiv" and index.args[1].is_const and index.args[1].attr > 0:
        inner = _bounds(index.args[0], ranges)
        return inner and (inner[0] // index.args[1].attr, inner[1] // index.args[1].attr)
    if index.op == "linear" and all(a.op == "var" and a.attr in ranges for a in index.args):
        coefficients, low = index.attr
        high = low
        for coefficient, arg in zip(coefficients, index.args, strict=True):
            ends = [coefficient * end for end in ranges[arg.attr]]
            low, high = low + np.minimum(*ends), high + np.maximum(*ends)
        return low, high
    return None
