"""The Hopper forward's role code, handed to the checker for a list of work tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fa4core.forward import protocol
from fa4core.forward.protocol import Role
from fa4core.pipeline.check import check
from fa4core.pipeline.record import Program
from fa4core.sm90.forward.consumer import ConsumerWork, consumer
from fa4core.sm90.forward.load import LoadWork, load
from fa4core.sm90.forward.spec import Spec

ROLES: dict[str, tuple[Role, type]] = {
    "consumer": (consumer, ConsumerWork),
    "load": (load, LoadWork),
}


def programs(
    spec: Spec, blocks: Sequence[int], change: Mapping[str, Role] | None = None
) -> list[Program]:
    """The events of every role for these work tiles; `change` replaces role functions."""
    known = {"tiles": tuple(range(spec.tiles)), "staged": not spec.split}
    return protocol.programs(ROLES, spec, blocks, known, change)


def check_forward(
    spec: Spec, blocks: Sequence[int], change: Mapping[str, Role] | None = None
) -> None:
    """Check the protocol for one CTA that works through tiles with these numbers of key blocks.

    Raises:
        fa4core.pipeline.check.ProtocolError: With a counterexample.
    """
    check(spec.pipeline, programs(spec, blocks, change))
