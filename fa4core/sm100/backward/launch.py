"""What a call's SM100 backward kernel is compiled for. `fa4core.backward.launch` does the rest.

It imports no DSL.
"""

from __future__ import annotations

from fa4core.backward.launch import Skeleton, common
from fa4core.backward.rule import Rule
from fa4core.plan.pairs import backward_ctas
from fa4core.reference.tiled import Call
from fa4core.sm100.backward.spec import Spec


def spec_of(call: Call, target: str, deterministic: bool) -> Spec:
    """What a call's kernel is compiled for."""
    program, problem = call.program, call.problem
    if program.schedule is None:
        head_dims, graph = (problem.head_dim, problem.head_dim_v), program.graph
        ctas = backward_ctas(target, graph.mask, graph.score, head_dims)
    else:
        ctas = program.schedule.ctas
    derivative = not Rule.of(program).is_identity
    return Spec(**common(call, target, deterministic), derivative=derivative, ctas=ctas)


BACKWARD = Skeleton(spec_of, "fa4core.sm100.backward.kernel:backward")
