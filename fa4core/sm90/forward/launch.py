"""What a call's Hopper forward kernel is compiled for, and what it takes at run time.

`fa4core.prepared` does the rest. It imports no DSL.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from fa4core.compile.kernel import Kernel
from fa4core.forward.arguments import captured
from fa4core.forward.metadata import Metadata, metadata, pre_pass
from fa4core.places import Place
from fa4core.plan.target import target as planned
from fa4core.plan.tiles import tile_map
from fa4core.prepared import Skeleton
from fa4core.reference.tiled import Call
from fa4core.sm90.forward.spec import ROWS, Spec
from fa4core.sm90.forward.tuning import Shape, shape_of
from primitives.schedule import Schedule


def spec_of(call: Call, target: str, shape: Shape | None = None) -> Spec:
    """What a call's kernel is compiled for; `shape` instead of the tuned one."""
    problem, program, hardware = call.problem, call.program, planned(target)
    threshold = program.rescale_threshold
    rows = max(problem.seqlens_q, default=0)
    masked = not program.graph.mask.is_const
    return Spec(
        graph=program.graph.dump(),
        dtype=str(problem.dtype).removeprefix("torch."),
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        shape=shape or shape_of(problem.head_dim, problem.head_dim_v, rows, masked),
        exp=program.exp or hardware.exp,
        threshold=hardware.rescale_threshold if threshold is None else float(threshold),
        negative_scale=call.scale <= 0,
        target=target,
    )


def metadata_of(call: Call, spec: Spec, place: Place, device: torch.device) -> Metadata:
    """The plan of a call; see `Metadata` for what else may use it."""
    problem = call.problem
    tiles = tile_map(
        call.program.graph.mask,
        batch=problem.batch,
        heads=problem.heads_q,
        seqlens_q=problem.seqlens_q,
        seqlens_k=problem.seqlens_k,
        tile_q=ROWS,
        tile_k=spec.keys,
    )
    return metadata(problem, tiles, spec.tiles, schedule_of(call), place, device)


def before(call: Call, place: Place) -> tuple[Kernel, ...]:
    """The kernels that `metadata_of` launches."""
    return (pre_pass(place),) if schedule_of(call).order == "batch_sorted" else ()


def schedule_of(call: Call) -> Schedule:
    """The variant's choice, or the default."""
    return call.program.schedule or Schedule()


def run_time(call: Call, spec: Spec, place: Place, plan: Metadata) -> tuple | None:
    """The kernel's arguments after row_max, as `kernel.forward` lists them; None: no work."""
    if not len(plan):
        return None
    persistent = schedule_of(call).source == "persistent"
    ctas = min(place.sms, len(plan)) if persistent else len(plan)
    return plan.items, plan.runs, captured(call.program.graph.captures), float(call.scale), ctas


FORWARD = Skeleton(
    spec_of,
    lambda spec: "fa4core.sm90.forward.kernel:forward",
    lambda call, spec, out, rows: (),
    metadata_of,
    before,
    run_time,
    lean=lambda spec: attrs.evolve(spec, row_max=False),
)


def shaped(shape: Shape, **changes: Any) -> Skeleton:
    """The skeleton with another shape than the tuned one, and other changes of its spec: for tests
    and tuning."""

    def changed(call: Call, target: str) -> Spec:
        return attrs.evolve(spec_of(call, target, shape), **changes)

    return attrs.evolve(FORWARD, spec_of=changed)
