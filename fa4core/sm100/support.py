"""What the SM100 kernels take, and why not the rest. Imports no kernel and no DSL."""

from __future__ import annotations

from fa4core.backward import support as backward
from fa4core.forward.support import refusal
from fa4core.plan.problem import Problem
from fa4core.program import Program
from fa4core.sm100.backward.spec import MAX_HEAD_DIM, TILE

__all__ = ["backward_refusal", "refusal"]


def backward_refusal(program: Program, problem: Problem) -> str | None:
    """Why there is no backward kernel for what the forward kernel takes, or None if there is."""
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > MAX_HEAD_DIM:
        return (
            f"head dim {widest}: dK and dV of {TILE} keys, S and dP fill Blackwell's tensor memory "
            f"at head dim {MAX_HEAD_DIM}"
        )
    return backward.refusal(program, problem)
