"""What a call's SM100 backward kernel is compiled for. `fa4core.backward.launch` does the rest.

It imports no DSL.
"""

from __future__ import annotations

from fa4core.backward.launch import Skeleton, common
from fa4core.backward.rule import Rule
from fa4core.reference.tiled import Call
from fa4core.sm100.backward.spec import Spec


def spec_of(call: Call, target: str, deterministic: bool) -> Spec:
    """What a call's kernel is compiled for."""
    derivative = not Rule.of(call.program).is_identity
    schedule = call.program.schedule
    return Spec(
        **common(call, target, deterministic),
        derivative=derivative,
        ctas=1 if schedule is None else schedule.ctas,
    )


BACKWARD = Skeleton(spec_of, "fa4core.sm100.backward.kernel:backward")
