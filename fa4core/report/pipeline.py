"""The pipeline of a call's forward kernel, for `python -m fa4core explain ... --pipeline`."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterator

from rich.console import RenderableType

from fa4core.backends import KERNELS
from fa4core.console import facts, section
from fa4core.pipeline.show import renderables
from fa4core.plan.plan import Plan
from fa4core.plan.problem import Problem
from fa4core.plan.target import target as planned
from fa4core.reference.tiled import Call
from fa4core.sm100.forward.launch import spec_of
from fa4core.sm100.forward.spec import Spec
from fa4core.variant import Variant

_PROVEN = (
    "for a list of work tiles: nobody waits for ever, no phase passes unseen, no barrier gets more "
    "arrivals than its phase takes, and accesses of overlapping memory are ordered unless both read"
)
_BLOCKS, _TILES = 4, 3


def call_for(variant: Variant, problem: Problem, target: str) -> Call:
    """A call that the forward kernels take.

    Raises:
        NotImplementedError: They don't; with the reason.
    """
    family = next((f for f in KERNELS.values() if target in f.targets), None)
    if family is None:
        raise NotImplementedError(
            f"target {target!r} has no kernels in this version; choose sm100, sm103 or sm90"
        )
    if reason := family.refusal(variant.program, problem):
        raise NotImplementedError(f"the {family.title} kernels do not take this call: {reason}")
    tiles = Plan(variant, problem, planned(target)).tiles
    return Call(variant.program, problem, lambda: tiles, None, 1 / math.sqrt(problem.head_dim))


def describe_call(variant: Variant, problem: Problem, target: str) -> Iterator[RenderableType]:
    """The pipeline, and what the checker says about it.

    Raises:
        NotImplementedError: As `call_for`, or it is not shown.
    """
    if target == "sm90":
        raise NotImplementedError("the pipeline is shown for sm100 and sm103 only, not for 'sm90'")
    spec = spec_of(call_for(variant, problem, target), target)
    yield from renderables(spec.pipeline)
    rows = [("proves", _PROVEN), ("of", "the functions that the kernel is compiled from")]
    yield from section("Checker", facts([*rows, ("here", _checked(spec))]))


def _checked(spec: Spec) -> str:
    """Runs the checker, if the role code can be imported."""
    if importlib.util.find_spec("cutlass") is None:
        return "not run: role code imports CuTe DSL; pip install nvidia-cutlass-dsl"
    from fa4core.compile import import_dsl

    import_dsl()
    from fa4core.sm100.forward.protocol import check_forward

    lists = list(itertools.product(range(_BLOCKS + 1), repeat=_TILES))
    for blocks in lists:
        check_forward(spec, blocks)
    return f"holds for all {len(lists)} lists of {_TILES} work tiles with 0 to {_BLOCKS} key blocks"
