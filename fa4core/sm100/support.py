"""What SM100 kernels take, and why not the rest. Imports no kernel and no DSL."""

from __future__ import annotations

import math

from fa4core.backward import support as backward
from fa4core.forward import support as common
from fa4core.plan.problem import Problem
from fa4core.program import Program
from fa4core.sm100.backward.spec import MAX_HEAD_DIM
from fa4core.sm100.forward.spec import TILE

ATOM = 8  # rows after which the swizzle of shared memory repeats


def refusal(program: Program, problem: Problem) -> str | None:
    """Why the kernel can't run a program on a problem, or None if it can."""
    if problem.page_size is not None and math.gcd(problem.page_size, TILE) < ATOM:
        return (
            f"page size {problem.page_size}: a block of {TILE} keys is copied in parts of "
            f"gcd(page size, {TILE}), and shared memory is swizzled {ATOM} rows at a time; take a "
            f"page size that is a multiple of {ATOM}"
        )
    return common.refusal(program, problem)


def backward_refusal(program: Program, problem: Problem, deterministic: bool) -> str | None:
    """Why there is no backward kernel for what the forward kernel takes, or None if there is."""
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > MAX_HEAD_DIM:
        return (
            f"head dim {widest}: dK and dV of {TILE} keys, S and dP fill Blackwell's tensor memory "
            f"at head dim {MAX_HEAD_DIM}"
        )
    return backward.refusal(program, problem, deterministic)
