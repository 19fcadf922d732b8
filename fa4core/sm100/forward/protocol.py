"""The forward's role code, handed to the checker for a list of work tiles.

The functions are those that `kernel` runs; nothing of the protocol is written down here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from fa4core.pipeline.check import check
from fa4core.pipeline.endpoint import Ends
from fa4core.pipeline.record import Program, effects_of, record
from fa4core.plan.kinds import FULL, PARTIAL
from fa4core.sm100.forward.correction import CorrectionWork, correction
from fa4core.sm100.forward.load import LoadWork, load
from fa4core.sm100.forward.mma import MmaWork, mma
from fa4core.sm100.forward.softmax import SoftmaxWork, softmax
from fa4core.sm100.forward.source import Answers, queue, scheduler, stride
from fa4core.sm100.forward.spec import Spec
from fa4core.sm100.forward.store import StoreWork, store
from fa4core.sm100.forward.work import FIELDS, Item, Plan, Share

ROLES: dict[str, tuple[Callable[..., Any], type]] = {
    "softmax": (softmax, SoftmaxWork),
    "correction": (correction, CorrectionWork),
    "mma": (mma, MmaWork),
    "load": (load, LoadWork),
    "store": (store, StoreWork),
}
QUEUE_ROLES: dict[str, tuple[Callable[..., Any], type]] = {"scheduler": (scheduler, Answers)}


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


def plan_of(spec: Any, blocks: Sequence[int]) -> Plan:
    """A plan of work tiles with these numbers of key blocks, for one CTA or pair of CTAs.

    `spec` is any skeleton's: it says how many tiles there are, and whether a queue hands them out.
    """
    zero = Item(*[0] * FIELDS)
    items: list[tuple[int, ...]] = []
    runs: list[tuple[int, ...]] = []
    for tile, count in enumerate(blocks):
        first = len(runs)
        half = count // 2  # both kinds, and never the same for two query tiles side by side
        runs += [(0, half, 0x11 * FULL + 0x44 * PARTIAL)] if half else []
        runs += [(half, count, 0x11 * PARTIAL + 0x44 * FULL)] if count else []
        item = attrs.evolve(zero, tile=tile, first_run=first, end_run=len(runs), blocks=count)
        items.append(attrs.astuple(item))
    source = queue(0, _Listed) if spec.dynamic else stride(0, 1)
    share = Share(spec.tiles)  # what the protocol depends on is the same in all CTAs
    return Plan(_Table(items), _Table(runs), len(items), source, share)


def programs(
    spec: Spec, blocks: Sequence[int], change: Mapping[str, Callable[..., Any]] | None = None
) -> list[Program]:
    """The events of every role for these work tiles; `change` replaces role functions."""
    plan = plan_of(spec, blocks)
    known = {"tiles": tuple(range(spec.tiles)), "parts": tuple(range(spec.out_parts))}
    recorded: list[Program] = []
    for role, (function, work) in (ROLES | (QUEUE_ROLES if spec.dynamic else {})).items():
        chosen = (change or {}).get(role, function)
        recorded += record(spec.pipeline, role, chosen, work, plan, known)
    return recorded


def check_forward(
    spec: Spec, blocks: Sequence[int], change: Mapping[str, Callable[..., Any]] | None = None
) -> None:
    """Check the protocol for one CTA, or a pair, that works through tiles of these many key blocks.

    Raises:
        fa4core.pipeline.check.ProtocolError: With a counterexample.
    """
    check(spec.pipeline, programs(spec, blocks, change))
