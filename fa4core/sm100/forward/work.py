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


@attrs.frozen(eq=False)
class Item:
    """A work tile: `tiles` query tiles of one head, side by side.

    Attributes:
        b, h: As mods see them.
        b_q, b_k: Index into the batch mode of queries and of keys; 0 where they are packed.
        h_kv: KV head.
        tile: Number of the group of query tiles.
        first_run, end_run: Its rows in the table of runs.
        blocks: Key tiles to visit in all.
        seqlen_q, seqlen_k: Lengths of the sequence.
        start_q, start_k: First row of the sequence in its tensor.
    """

    b: Any
    h: Any
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
class Run:
    """Consecutive key tiles, with the kind of each tile packed two bits a query tile."""

    first: Any
    end: Any
    kinds: Any


FIELDS = len(attrs.fields(Item))
RUN_FIELDS = len(attrs.fields(Run))


class Plan(Fixed):
    """A role's view of the plan: `count` work tiles, which a work source hands out.

    `items` and `runs` are indexed as `table[row, field]`: device tensors, or lists of tuples in the
    checker through `rows`. `source` makes a role's end of the work source from its endpoints.
    `uniform` tells the compiler that what was read is the same in all threads of a warp, so that
    loops over it don't count as divergent.
    """

    def __init__(
        self,
        items: Any,
        runs: Any,
        count: Any,
        source: Callable[[Ends], Any],
        uniform: Callable[[Any], Any] = lambda number: number,
    ):
        self.items, self.runs, self.count, self.source = items, runs, count, source
        self.uniform = uniform

    def item(self, index: Any) -> Item:
        return Item(*(self.uniform(self.items[index, i]) for i in range(FIELDS)))

    def run(self, index: Any) -> Run:
        return Run(*(self.uniform(self.runs[index, i]) for i in range(RUN_FIELDS)))

    def kind(self, run: Run, t: Any) -> Any:
        """Kind of the run for query tile `t` of the work tile."""
        return (run.kinds >> (2 * t)) & 3
