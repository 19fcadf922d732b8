"""The Hopper forward's role code, handed to the checker for a list of work tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fa4core.pipeline.check import check
from fa4core.pipeline.record import Program, record
from fa4core.sm90.forward.consumer import ConsumerWork, consumer
from fa4core.sm90.forward.load import LoadWork, load
from fa4core.sm90.forward.spec import Spec
from fa4core.sm100.forward.protocol import plan_of

ROLES: dict[str, tuple[Callable[..., Any], type]] = {
    "consumer": (consumer, ConsumerWork),
    "load": (load, LoadWork),
}


def programs(
    spec: Spec, blocks: Sequence[int], change: Mapping[str, Callable[..., Any]] | None = None
) -> list[Program]:
    """The events of every role for these work tiles; `change` replaces role functions."""
    plan, known = plan_of(spec, blocks), {"tiles": tuple(range(spec.tiles))}
    recorded: list[Program] = []
    for role, (function, work) in ROLES.items():
        chosen = (change or {}).get(role, function)
        recorded += record(spec.pipeline, role, chosen, work, plan, known)
    return recorded


def check_forward(
    spec: Spec, blocks: Sequence[int], change: Mapping[str, Callable[..., Any]] | None = None
) -> None:
    """Check the protocol for one CTA that works through tiles with these numbers of key blocks.

    Raises:
        fa4core.pipeline.check.ProtocolError: With a counterexample.
    """
    check(spec.pipeline, programs(spec, blocks, change))
