"""Role code of either pass, handed to the checker for a list of work tiles. Which roles there are
is up to the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from fa4core.forward.source import Answers, queue, stride
from fa4core.forward.work import Plan, Share
from fa4core.pipeline.endpoint import Ends
from fa4core.pipeline.record import Program, effects_of, record
from fa4core.plan.kinds import FULL, PARTIAL

Role = Callable[..., Any]
Roles = Mapping[str, tuple[Role, type]]  # by name: its function, and its work with the effects


def programs(
    roles: Roles,
    spec: Any,
    blocks: Sequence[int],
    known: Mapping[str, Any],
    change: Mapping[str, Role] | None = None,
    plans: type[Plan] = Plan,
) -> list[Program]:
    """The events of every role for work tiles that visit these many tiles.

    Args:
        roles: Of the target.
        spec: The target's: what its pipeline, its tiles and its work source follow from.
        blocks: Tiles that each work tile visits.
        known: What role code asks its work for, by name.
        change: Functions in place of the roles'.
        plans: The plan of the pass.
    """
    plan = plan_of(spec, blocks, plans)
    recorded: list[Program] = []
    for role, (function, work) in roles.items():
        chosen = (change or {}).get(role, function)
        recorded += record(spec.pipeline, role, chosen, work, plan, dict(known))
    return recorded


class _Table:
    """Rows of numbers, indexed as the device's tables are."""

    def __init__(self, rows: Sequence[tuple[int, ...]]):
        self.rows = rows

    def __getitem__(self, place: tuple[int, int]) -> int:
        return self.rows[place[0]][place[1]]


class _Listed:
    """Answers of a queue that hands one CTA every tile."""

    def __init__(self, ends: Ends):
        self.recorded = effects_of(Answers, ends)

    def take(self, stage: int, index: int) -> int:
        self.recorded.take(stage, index)
        return index + 1


def plan_of(spec: Any, blocks: Sequence[int], plans: type[Plan] = Plan) -> Plan:
    """A plan of work tiles that visit so many tiles, for one CTA or pair of CTAs.

    `spec` is any skeleton's: it says how many tiles there are, and whether a queue hands them out.
    """
    zero = plans.of_items(*[0] * len(attrs.fields(plans.of_items)))
    rest = [0] * (len(attrs.fields(plans.of_runs)) - 3)
    items: list[tuple[int, ...]] = []
    runs: list[tuple[int, ...]] = []
    for tile, count in enumerate(blocks):
        first = len(runs)
        half = count // 2  # both kinds, and never the same for two query tiles side by side
        runs += [(0, half, 0x11 * FULL + 0x44 * PARTIAL, *rest)] if half else []
        runs += [(half, count, 0x11 * PARTIAL + 0x44 * FULL, *rest)] if count else []
        item = attrs.evolve(zero, tile=tile, first_run=first, end_run=len(runs), blocks=count)
        items.append(attrs.astuple(item))
    source = queue(0, _Listed) if spec.dynamic else stride(0, 1)
    share = Share(spec.tiles)  # what the protocol depends on is the same in all CTAs
    return plans(_Table(items), _Table(runs), len(items), source, share)
