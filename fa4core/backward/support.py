"""What every backward kernel takes of what forward kernels do. Imports no kernel and no DSL."""

from __future__ import annotations

from fa4core.backward.rule import Rule
from fa4core.forward.support import wide_integer
from fa4core.plan.problem import Problem
from fa4core.program import Program


def refusal(program: Program, problem: Problem) -> str | None:
    """Why no backward kernel can run what a forward kernel can, or None if one may."""
    if problem.page_size is not None:
        return "backward kernels take no paged keys"
    return wide_integer(Rule.of(program).roots, "the derivative of the score mod")
