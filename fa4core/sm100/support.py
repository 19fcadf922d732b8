"""What the SM100 kernels take, and why not the rest. Imports no kernel and no DSL."""

from __future__ import annotations

from fa4core.forward.support import refusal
from fa4core.plan.problem import Problem
from fa4core.program import Program

__all__ = ["backward_refusal", "refusal"]


def backward_refusal(program: Program, problem: Problem, deterministic: bool) -> str | None:
    """Why there is no backward kernel for what the forward kernel takes, or None if there is."""
    return "there are no backward kernels for Blackwell yet"
