"""What every forward kernel takes, and why not the rest. Imports no kernel and no DSL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from fa4core.plan.problem import Problem
from fa4core.program import Program
from fa4core.spec import MAX_HEAD_DIM
from primitives.expr import Node, walk

_DTYPES = (torch.bfloat16, torch.float16)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_CAPTURED = (*_DTYPES, torch.float32, torch.bool, *_INTEGERS)

ATOM = 8  # rows after which the swizzle of shared memory repeats


def refusal(program: Program, problem: Problem) -> str | None:
    """Why no kernel can run a program on a problem, or None if one may."""
    if problem.dtype not in _DTYPES:
        return f"the kernels take bfloat16 and float16, not {problem.dtype}; convert the inputs"
    for name, d in (("head dim", problem.head_dim), ("head dim of v", problem.head_dim_v)):
        if d % 8 or not 8 <= d <= MAX_HEAD_DIM:
            return (
                f"{name} {d} is no multiple of 8 from 8 to {MAX_HEAD_DIM}; pad with zeros and pass "
                "the scale of the true head dim"
            )
    if problem.page_size is not None and problem.page_size % ATOM:
        return (
            f"page size {problem.page_size}: keys are copied out of pages into shared memory that "
            f"is swizzled {ATOM} rows at a time; take a page size that is a multiple of {ATOM}"
        )
    for capture in program.graph.captures:
        if capture.dtype not in _CAPTURED:
            return f"a captured tensor is {capture.dtype}; use float32 or a smaller type"
    return wide_integer(program.graph.roots, "the mask, score mod or sink")


def wide_integer(roots: Iterable[Node], where: str) -> str | None:
    """Why integers of a graph don't fit the kernels', or None if they do."""
    for node in walk(*roots):
        wide = [n for n in _integers(node.attr) if not -(2**31) <= n < 2**31]
        if wide:
            return (
                f"the kernels compute integers in 32 bits, and {wide[0]} in {where} needs more; "
                "compute what needs more outside the function and capture it"
            )
    return None


def _integers(attribute: object) -> Iterator[int]:
    """The integers in a node's attribute."""
    if isinstance(attribute, tuple):
        for part in attribute:
            yield from _integers(part)
    elif isinstance(attribute, int):
        yield attribute
