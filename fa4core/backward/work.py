"""Work tiles of the backward pass: the one plan that all roles read.

A work tile is a tile of keys of one KV head (a pair of CTAs has two, side by side). It visits query
tiles of every query head of the group, head by head, so that dK and dV are complete in it.
"""

from __future__ import annotations

from typing import Any

import attrs

from fa4core.forward import work as forward
from fa4core.forward.work import WorkTile


@attrs.frozen(eq=False)
class Item(WorkTile):
    """A work tile: a tile of keys of one KV head.

    Attributes:
        h: The first query head of its group.
        rows_q: Where the sequence's rows begin in padded tensors; see `rows.Rows`.
    """

    h: Any
    rows_q: Any


@attrs.frozen(eq=False)
class Run(forward.Run):
    """Consecutive query tiles of one query head, with the kind of each packed two bits a key tile.

    Attributes:
        head: The query head, counted from the item's `h`: KV heads alike share runs.
        turn, step: Where shares of dQ are added in a fixed order: that of query tile `i` is added
            when `turn + step * (i - first)` others have been. 0 where the order is free.
    """

    head: Any
    turn: Any = 0
    step: Any = 0


FIELDS = len(attrs.fields(Item))
RUN_FIELDS = len(attrs.fields(Run))


class Plan(forward.Plan):
    """A role's view of the plan. What it says of query tiles in the forward pass (`kind`, `end`)
    holds for key tiles here."""

    of_items = Item
    of_runs = Run

    @staticmethod
    def turn(run: Run, i: Any) -> Any:
        """How many shares of dQ of query tile `i` are added before this one."""
        return run.turn + run.step * (i - run.first)
