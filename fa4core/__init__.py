"""fa4core: attention variants composed from orthogonal primitives."""

from fa4core.attention import attention
from fa4core.backends import Support, supports
from fa4core.plan.explain import Explanation, explain
from fa4core.plan.problem import Problem
from fa4core.variant import Variant

__all__ = [
    "Explanation",
    "Problem",
    "Support",
    "Variant",
    "attention",
    "explain",
    "supports",
]
