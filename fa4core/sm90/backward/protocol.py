"""The Hopper backward's role code, handed to the checker for a list of work tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fa4core.backward.work import Plan
from fa4core.forward import protocol
from fa4core.forward.protocol import Role
from fa4core.pipeline.check import check
from fa4core.pipeline.record import Program
from fa4core.sm90.backward import ahead, consumer
from fa4core.sm90.backward.load import LoadWork, load
from fa4core.sm90.backward.reduce import ReduceWork, reduce
from fa4core.sm90.backward.spec import Spec
from fa4core.sm90.backward.warpgroup import ConsumerWork


def roles_of(spec: Spec) -> dict[str, tuple[Role, type]]:
    """By name: the role's code, and what it does."""
    return {
        "consumer": (ahead.consumer if spec.held else consumer.consumer, ConsumerWork),
        "load": (load, LoadWork),
        "reduce": (reduce, ReduceWork),
    }


def programs(
    spec: Spec,
    blocks: Sequence[int],
    change: Mapping[str, Role] | None = None,
) -> list[Program]:
    """The events of every role for these work tiles.

    Args:
        spec: Of the kernel.
        blocks: Query tiles that each work tile visits.
        change: Functions in place of the roles'.
    """
    known = {
        "tiles": tuple(range(spec.tiles)),
        "groups": tuple(range(spec.shape.groups)),
        "passes": tuple(range(spec.shape.passes)),
        "differentiates": spec.differentiates,
        "late": spec.late,
    }
    declared = {role.name for role in spec.pipeline.roles}
    roles = {name: role for name, role in roles_of(spec).items() if name in declared}
    return protocol.programs(roles, spec, blocks, known, change, Plan)


def check_backward(
    spec: Spec,
    blocks: Sequence[int],
    change: Mapping[str, Role] | None = None,
) -> None:
    """Check the protocol for one CTA that works through tiles that visit so many query tiles.

    Raises:
        fa4core.pipeline.check.ProtocolError: With a counterexample.
    """
    check(spec.pipeline, programs(spec, blocks, change))
