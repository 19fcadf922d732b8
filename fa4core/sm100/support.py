"""What the SM100 kernels take, and why not the rest. Imports no kernel and no DSL."""

from __future__ import annotations

from fa4core.backward import support as backward
from fa4core.forward.support import refusal
from fa4core.plan.problem import Problem
from fa4core.program import Program
from fa4core.sm100.backward.tuning import NARROW

__all__ = ["backward_refusal", "refusal"]


def backward_refusal(program: Program, problem: Problem) -> str | None:
    """Why there is no backward kernel for what the forward kernel takes, or None if there is."""
    widest, schedule = max(problem.head_dim, problem.head_dim_v), program.schedule
    if schedule is not None and schedule.ctas > 1 and widest > NARROW:
        return (
            f"pairs of CTAs in the backward take head dims up to {NARROW}, not {widest}; use "
            "ctas=1 in the schedule"
        )
    return backward.refusal(program, problem)
