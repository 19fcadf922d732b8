"""What a backward kernel is compiled for, and the pipeline that follows from it.

Plain values: nothing here imports the DSL. The protocol in words (FlashAttention-4, section 3.2): a
CTA keeps K and V of 128 keys, and dK and dV in tensor memory, while tiles of queries go by.
Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T, a lane of tensor memory for each key,
so that P^T and dS^T are operands there. Block by block, the MMA warp issues S of the next block,
then dK and dQ of this one, then dP and dV of the next one: while the tensor core works on dK and
dQ, the compute role makes P of the next block.

One thread issues all products and the tensor core runs them in order, so "dP of block i + 1 is
there" also says that dQ of block i is done: dS may be overwritten. S may be overwritten by the next
block's because the dV that read its alias P was issued before. LSE and delta may be overwritten
with Q: dK, which read it, needed dS. dV and dK may be overwritten by the next work tile's: dV needs
P, which the compute role makes when it has read them. dQ has no room of its own if head dims are
large; then dP of the next block must wait until the reduce role has read dQ. Head dims above 128
have tiles of 64 queries and may take two launches; see `tuning`.

With two CTAs, a cluster works on two tiles of keys side by side. The first CTA's MMA warp issues
products of 256 keys, 128 in each CTA; each loads half of every operand B: of the queries for S and
dP, of the columns (of the head dim) for dV and dK, which is why Q and dO are loaded both ways. dQ
is the sum over both tiles of keys: each CTA forms it for half of a block's queries, so that half as
much is added in global memory. It needs dS of all 256 keys for that, and gets the other tile's from
its peer, which copies it over; K is loaded both ways, too. dP of the next block is issued before
dQ of this one, so that the tensor core works while dS is under way. dQ lies where S was: between
the halves of P, which then are at the ends: dQ waits until the compute role has read S, and S of
the block after the next one until the reduce role has read dQ.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import attrs

from fa4core.pipeline.declare import How, Limits, Pipeline, Region, Role, Signal
from fa4core.pipeline.layout import place
from fa4core.sm100.backward.tiles import HALVES, TILE, Tiles
from fa4core.sm100.backward.tuning import STAGES, Stages

PART = 64  # columns of dK or dV staged at a time: rows of 128 bytes
ROW_STAGES = 2  # LSE and delta of this block, and of the next one


@attrs.frozen
class Result:
    """Columns of dV or dK that one copy of the compute role brings to global memory.

    Attributes:
        name: "dv" or "dk".
        first, columns: Which.
        half: Number of the copy.
    """

    name: str
    first: int
    columns: int
    half: int


@attrs.frozen(slots=False)
class Spec(Tiles):
    """A Blackwell backward kernel."""

    @cached_property
    def stages(self) -> Stages:
        """Lengths of rings in shared memory: the first choice that fits."""
        limit, choices = Limits().smem_bytes, STAGES[self.ctas]
        fits = (stages for stages in choices if _bytes(self._shared(stages)) <= limit)
        return next(fits, choices[-1])

    @property
    def results(self) -> tuple[Result, ...]:
        """dV and dK in parts, which the copies of the compute role take in turn."""
        columns = {"dv": self.d_v} if self.with_v else {}
        columns |= {"dk": self.d} if self.with_k else {}
        parts = [
            (name, first, min(PART, count - first))
            for name, count in columns.items()
            for first in range(0, count, PART)
        ]
        copies = self.stages.staged
        return tuple(Result(*part, n % copies) for n, part in enumerate(parts))

    @property
    def parts_ahead(self) -> tuple[int, ...]:
        """How many parts of dQ TMA may still be reading when each one is staged: the first part of
        a block, if parts are odd in number, is staged where the last one before it was."""
        parts, stages = len(self.shares), self.stages.added
        return tuple(0 if part == 0 and parts % stages else stages - 1 for part in range(parts))

    @property
    def ahead(self) -> bool:
        """Whether S of the next block is computed before dK of this one."""
        return self.pair or self.stages.q > 1

    @cached_property
    def pipeline(self) -> Pipeline:
        reduce, compute, others = self.registers
        return Pipeline(
            roles=(
                Role("reduce", 0, 4, registers=reduce),
                Role("compute", 4, 4, copies=HALVES, registers=compute),
                Role("mma", 12, 1, registers=others, leader=True),
                Role("load", 13, 1, registers=others),
                *self._rest(others),
            ),
            signals=(
                *self._signals,
                *(self._signals_of_k if self.with_k else ()),
                *(self._signals_of_pairs if self.pair else ()),
            ),
            smem=self._shared(self.stages),
            tmem=self._columns,
            ctas=self.ctas,
        )

    def _rest(self, registers: int) -> tuple[Role, ...]:
        """Roles that fill the last warpgroup."""
        if not self.pair:
            return (Role("spare", 14, 2, registers=registers),)
        return (
            Role("relay", 14, 1, registers=registers),
            Role("spare", 15, 1, registers=registers),
        )

    @property
    def _signals(self) -> tuple[Signal, ...]:
        tma, commit, warps, stages = How.TMA, How.COMMIT, How.WARPS, self.stages.q
        return (
            Signal("k_full", (("load", tma),), "mma"),
            Signal("k_empty", (("mma", commit),), "load", passed=True),
            Signal("q_full", (("load", tma),), "mma", stages=stages),
            Signal("q_empty", (("mma", commit),), "load", stages=stages, passed=True),
            Signal("do_full", (("load", tma),), "mma"),
            Signal("do_empty", (("mma", commit),), "load", passed=True),
            Signal("rows_full", (("load", tma),), "compute", stages=ROW_STAGES),
            Signal("s_full", (("mma", commit),), "compute"),
            Signal("p_ready", (("compute", warps),), "mma"),
            Signal("grads_full", (("mma", commit),), "compute"),
        )

    @property
    def _signals_of_k(self) -> tuple[Signal, ...]:
        tma, commit, warps = How.TMA, How.COMMIT, How.WARPS
        # 64 queries: results are staged where the other copy's dS lies
        read = (Signal("staged_read", (("compute", warps),), "compute"),)
        return (
            Signal("v_full", (("load", tma),), "mma"),
            Signal("v_empty", (("mma", commit),), "load", passed=True),
            Signal("dp_full", (("mma", commit),), "compute"),
            Signal("ds_ready", (("compute", warps),), "mma"),
            Signal("dq_full", (("mma", commit),), "reduce"),
            Signal("dq_empty", (("reduce", warps),), "mma", passed=True),
            *(read if self.wide else ()),
        )

    @property
    def _signals_of_pairs(self) -> tuple[Signal, ...]:
        tma, commit, warps = How.TMA, How.COMMIT, How.WARPS
        between = self.dq_inside == "scores"  # dQ need not wait for P then, but for who reads S
        return (
            Signal("k_columns_full", (("load", tma),), "mma"),
            Signal("k_columns_empty", (("mma", commit),), "load", passed=True),
            Signal("q_columns_full", (("load", tma),), "mma"),
            Signal("q_columns_empty", (("mma", commit),), "load", passed=True),
            Signal("do_columns_full", (("load", tma),), "mma"),
            Signal("do_columns_empty", (("mma", commit),), "load", passed=True),
            # a tile for each half of the queries: it arrives in the CTA that has this half of dQ
            Signal("ds_copied", (("compute", How.COPY),), "relay", copies=HALVES),
            Signal("ds_exchanged", (("relay", warps),), "mma"),
            Signal("ds_empty", (("mma", commit),), "compute", passed=True),
            *((Signal("s_read", (("compute", warps),), "mma"),) if between else ()),
        )

    def _shared(self, stages: Stages) -> tuple[Region, ...]:
        """See `ds_stage`; behind the last block, dK and dV are staged where dS was."""
        part, ds = TILE * PART * 2, TILE * self.half * 2
        tiles = 3 if self.pair else HALVES
        staged = tiles if self.pair else stages.staged
        of_k = (
            # of 64 queries the halves lie side by side in rows of 128 bytes, not like this
            Region("ds", ds, stages=tiles, stride=ds, inside="results"),
            Region("v", TILE * self.d_v * 2, align=1024),
            Region("added", TILE * self.added * 4, stages=stages.added, align=1024),
        )
        return (
            Region("k", TILE * self.d * 2, align=1024),
            Region("q", self.rows * self.d * 2, stages=stages.q, align=1024),
            Region("do", self.rows * self.d_v * 2, align=1024),
            *self._by_columns(stages.q),
            Region("results", staged * part, align=1024),
            Region("staged", part, stages=staged, stride=part, inside="results"),
            *(of_k if self.with_k else ()),
            Region("rows", 2 * self.queries * 4, stages=ROW_STAGES, align=16),  # LSE and delta
            Region("barriers", 256, align=16),
            Region("address", 16, align=16),
        )

    def _by_columns(self, q_stages: int) -> tuple[Region, ...]:
        """Operands B of dQ, dK and dV: in a pair half of the columns, and all rows of K's two tiles
        and of Q and dO."""
        host = {x: None if self.pair else x for x in ("k", "q", "do")}
        return (
            Region("k_columns", TILE * self.d * 2, inside=host["k"], align=1024),
            Region("q_columns", self.rows * self.d * 2, q_stages, inside=host["q"], align=1024),
            Region("do_columns", self.rows * self.d_v * 2, inside=host["do"], align=1024),
        )

    @property
    def _columns(self) -> tuple[Region, ...]:
        """Everything by halves of the queries is in stages: each copy of the compute role reads its
        half, and overwrites it with 16-bit values, two a column, whatever the other one does."""
        half, inside = self.half, self.dq_inside
        between = inside == "scores"  # dQ, the halves of P
        halves = {"stages": HALVES, "stride": half}
        at_the_ends = {"stages": HALVES, "stride": self.queries - half // 2}
        of_k = (
            Region("grads", max(self.queries, self.dq_columns if inside == "grads" else 0)),
            Region("dp", half, inside="grads", **halves),
            Region("ds_t", half // 2, inside="grads", **halves),
            Region("dk", self.d),
            Region("dq", self.dq_columns, inside=inside, offset=half // 2 if between else 0),
        )
        return (
            Region("scores", self.queries),
            Region("s", half, inside="scores", **halves),
            Region("p", half // 2, inside="scores", **(at_the_ends if between else halves)),
            *((Region("dv", self.d_v),) if self.with_v else ()),
            *(of_k if self.with_k else ()),
        )


def _bytes(regions: tuple[Region, ...]) -> int:
    """Of regions, laid out without a limit."""
    return max(p.end for p in place(regions, 1 << 30, "bytes").values())


def ds_stage(pair: bool, cta: Any, half: Any) -> Any:
    """Where dS of half of the queries lies in shared memory. In a pair, stages are the tiles of
    keys, of the queries for which the CTA forms dQ; from the third one the rest is copied to the
    peer."""
    return cta + (half ^ cta) * (2 - cta) if pair else half
