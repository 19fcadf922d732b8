"""What a call's Hopper backward kernel is compiled for; `fa4core.backward.launch` does the rest.

It imports no DSL.
"""

from __future__ import annotations

import attrs

from fa4core.backward.launch import Skeleton, common
from fa4core.backward.rule import Rule
from fa4core.reference.tiled import Call
from fa4core.sm90.backward.spec import Spec
from fa4core.sm90.backward.tuning import Shape, shape_of


def spec_of(call: Call, target: str, deterministic: bool) -> Spec:
    """What a call's main kernel is compiled for."""
    problem, rule = call.problem, Rule.of(call.program)
    shape = shape_of(problem.head_dim, problem.head_dim_v, not rule.is_identity)
    return Spec(**common(call, target, deterministic), shape=shape)


BACKWARD = Skeleton(spec_of, "fa4core.sm90.backward.kernel:backward")


def shaped(shape: Shape) -> Skeleton:
    """The skeleton with another shape than the tuned one: for tests and tuning."""

    def changed(call: Call, target: str, deterministic: bool) -> Spec:
        return attrs.evolve(spec_of(call, target, deterministic), shape=shape)

    return attrs.evolve(BACKWARD, spec_of=changed)
