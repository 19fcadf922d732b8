"""What the Hopper forward kernel takes, and why not the rest. Imports no kernel and no DSL."""

from __future__ import annotations

from fa4core.backward import support as backward
from fa4core.forward import support as common
from fa4core.plan.problem import Problem
from fa4core.program import Program


def refusal(program: Program, problem: Problem) -> str | None:
    """Why the kernel can't run a program on a problem, or None if it can."""
    schedule = program.schedule
    if schedule is not None and schedule.source == "dynamic":
        return "Hopper has no work queue in hardware; use source='persistent' or 'one_tile'"
    if schedule is not None and schedule.ctas > 1:
        return f"CTAs share products on Blackwell only, not {schedule.ctas} on Hopper; use ctas=1"
    return common.refusal(program, problem)


def backward_refusal(program: Program, problem: Problem) -> str | None:
    """Why there is no backward kernel for what the forward kernel takes, or None if there is."""
    return backward.refusal(program, problem)
