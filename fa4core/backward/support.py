"""What every backward kernel takes of what forward kernels do. Imports no kernel and no DSL."""

from __future__ import annotations

from fa4core.backward.rule import Rule
from fa4core.forward.support import wide_integer
from fa4core.plan.problem import Problem
from fa4core.program import Program

MOST_ORDERED = 4096  # elements of a tensor that every warp has for itself


def refusal(program: Program, problem: Problem, deterministic: bool) -> str | None:
    """Why no backward kernel can run what a forward kernel can, or None if one may."""
    if problem.page_size is not None:
        return "backward kernels take no paged keys"
    rule = Rule.of(program)
    if deterministic and (reason := _unordered(rule)):
        return reason
    return wide_integer(rule.roots, "the derivative of the score mod")


def _unordered(rule: Rule) -> str | None:
    """Why gradients of captured tensors depend on the order of work, or None if they don't."""
    if rule.moving:
        return (
            "backward kernels add up the gradient of a captured tensor in no fixed order where its "
            "index depends on the query or the key; deterministic=True takes indices of heads and "
            "sequences"
        )
    sizes = [c.tensor.numel() for c in rule.receivers if c.tensor is not None]
    if max(sizes, default=0) > MOST_ORDERED:
        return (
            f"deterministic=True with the gradient of a captured tensor of {max(sizes)} elements: "
            f"every warp has sums of its own, for at most {MOST_ORDERED} elements"
        )
    return None
