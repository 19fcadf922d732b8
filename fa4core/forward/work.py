"""Work tiles and their runs of key tiles: the one plan that all roles read.

`tables` makes it on the host, as two small int32 tensors; on the device a role reads a row of them
at a time. No role computes a trip count or a bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from fa4core.pipeline.effects import Fixed
from fa4core.pipeline.endpoint import Ends
from fa4core.plan.kinds import FULL


@attrs.frozen(eq=False)
class WorkTile:
    """A work tile of either pass: rows of one sequence, and the runs of tiles that they visit.

    Attributes:
        b: The sequence, as mods see it.
        b_q, b_k: Index into the batch mode of queries and of keys; 0 where they are packed.
        h_kv: KV head.
        tile: Number of the group of tiles of rows.
        first_run, end_run: Its rows in the table of runs.
        blocks: Tiles to visit in all.
        seqlen_q, seqlen_k: Lengths of the sequence.
        start_q, start_k: First row of the sequence in its tensor.
    """

    b: Any
    b_q: Any
    b_k: Any
    h_kv: Any
    tile: Any
    first_run: Any
    end_run: Any
    blocks: Any
    seqlen_q: Any
    seqlen_k: Any
    start_q: Any
    start_k: Any


@attrs.frozen(eq=False)
class Item(WorkTile):
    """A work tile: `tiles` query tiles of one head, side by side, that visit key tiles.

    Attributes:
        h: The head, as mods see it.
        share: Which of the shares of its keys, 0 if they are not split.
    """

    h: Any
    share: Any = 0


@attrs.frozen(eq=False)
class Run:
    """Consecutive tiles, with the kind of each tile packed two bits a query tile.

    In the forward pass they are steps from `first` up to `end`, and `key_tile` says of which key
    tile a step is.
    """

    first: Any
    end: Any
    kinds: Any


def key_tile(step: Any) -> Any:
    """The key tile of a step: the last one comes first.

    Where later keys are attended to by fewer queries (causal masks) or weigh more (biases that fall
    with the distance), the row's maximum is found at once, and nothing accumulated is rescaled.
    """
    return -step


@attrs.frozen(eq=False)
class Row:
    """Index of the query within its sequence, not below `seqlen_q` if there is none; its head."""

    query: Any
    head: Any


@attrs.frozen(eq=False)
class Share:
    """What a CTA has of a work tile: `tiles` query tiles, behind those of the CTAs before it.

    Attributes:
        tiles: Query tiles of each CTA.
        cta: Rank of the CTA among those that share the work tile.
        ctas: How many those are.
    """

    tiles: int
    cta: Any = 0
    ctas: int = 1


ANSWER_BYTES = 16  # of the work queue: which tile is next

FIELDS = len(attrs.fields(Item))
RUN_FIELDS = len(attrs.fields(Run))


class Plan(Fixed):
    """A role's view of the plan: `count` work tiles, which a work source hands out.

    The backward pass derives its own, with other rows of tables and keys in place of queries.

    `items` and `runs` are indexed as `table[row, field]`: device tensors, or lists of tuples in the
    checker through `rows`. `source` makes a role's end of the work source from its endpoints.
    `uniform` tells the compiler that what was read is the same in all threads of a warp, so that
    loops over it don't count as divergent. `share` is what the role's CTA has of a work tile.
    """

    of_items: type[WorkTile] = Item
    of_runs: type[Run] = Run

    def __init__(
        self,
        items: Any,
        runs: Any,
        count: Any,
        source: Callable[[Ends], Any],
        share: Share,
        uniform: Callable[[Any], Any] = lambda number: number,
    ):
        self.items, self.runs, self.count, self.source = items, runs, count, source
        self.share, self.uniform = share, uniform

    def item(self, index: Any) -> Any:
        """The CTA's share of a work tile, as a work tile of its own."""
        item = self._row(self.items, index, self.of_items)
        if self.share.ctas == 1:
            return item
        return attrs.evolve(item, tile=item.tile * self.share.ctas + self.share.cta)

    def run(self, index: Any) -> Any:
        return self._row(self.runs, index, self.of_runs)

    def _row(self, table: Any, index: Any, of: type) -> Any:
        return of(*(self.uniform(table[index, i]) for i in range(len(attrs.fields(of)))))

    def kind(self, run: Run, t: Any) -> Any:
        """Kind of the run for the CTA's query tile `t`."""
        return (run.kinds >> (2 * (self.share.cta * self.share.tiles + t))) & 3

    def end(self, run: Run, t: Any, partial: bool) -> Any:
        """Where the run ends for the CTA's query tile `t` if it is of this kind; else its start."""
        full = self.kind(run, t) // FULL  # arithmetic, because a device value can't branch here
        return run.first + (run.end - run.first) * (1 - full if partial else full)
