"""What a backward kernel is compiled for, and the pipeline that follows from it.

Plain values: nothing here imports the DSL. The protocol in words (FlashAttention-4, section 3.2): a
CTA keeps K and V of 128 keys, and dK and dV in tensor memory, while tiles of 128 queries go by.
Scores are computed transposed, S^T = K Q^T and dP^T = V dO^T, a lane of tensor memory for each key,
so that P^T and dS^T are operands there. Block by block, the MMA warp issues S of the next block,
then dK and dQ of this one, then dP and dV of the next one: while the tensor core works on dK and
dQ, the compute role makes P of the next block.

One thread issues all products and the tensor core runs them in order, so "dP of block i + 1 is
there" also says that dQ of block i is done: dS may be overwritten. S may be overwritten by the next
block's because the dV that read its alias P was issued before. LSE and delta may be overwritten
with Q: dK, which read it, needed dS. dV and dK may be overwritten by the next work tile's: dV needs
P, which the compute role makes when it has read them. dQ has no room of its own if head dims are
large; then dP of the next block must wait until the reduce role has read dQ.

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

from fa4core.backward.spec import BackwardSpec
from fa4core.pipeline.declare import How, Limits, Pipeline, Region, Role, Signal
from fa4core.sm100.spec import InTensorMemory

TILE = 128  # keys of a work tile and queries of a block
HALVES = 2  # of a block's queries: one for each copy of the compute role
HALF = TILE // HALVES
PART = 64  # columns of dK or dV staged at a time: rows of 128 bytes
MAX_HEAD_DIM = 128


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
class Spec(InTensorMemory, BackwardSpec):
    """A Blackwell backward kernel.

    Attributes:
        derivative: Whether d value / d score is anything but 1, or captured tensors have gradients:
            raw scores are then kept until dP is there.
    """

    derivative: bool = attrs.field(default=False, kw_only=True)
    target: str = attrs.field(default="sm100", kw_only=True)

    @property
    def queries(self) -> int:
        return TILE

    @property
    def keys(self) -> int:
        return TILE

    @property
    def d(self) -> int:
        """Head dim of the tiles: every CTA has a multiple of 16 of an operand's columns."""
        step = 16 * self.ctas
        return -(-self.head_dim // step) * step

    @property
    def d_v(self) -> int:
        step = 16 * self.ctas
        return -(-self.head_dim_v // step) * step

    @property
    def pair(self) -> bool:
        """Whether two CTAs share a work tile."""
        return self.ctas == 2

    @property
    def rows(self) -> int:
        """Queries of a block that a CTA has of operand B of S and dP, and of dQ."""
        return TILE // self.ctas

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of the reduce role, which takes a row of dQ at once; of the compute role; of others."""
        if self.derivative:
            return 72, 192, 56
        return (152, 136, 88) if self.ctas == 1 else (136, 136, 104)

    @property
    def results(self) -> tuple[Result, ...]:
        """dV and dK in parts, which the copies of the compute role take in turn."""
        parts = [
            (name, first, min(PART, columns - first))
            for name, columns in (("dv", self.d_v), ("dk", self.d))
            for first in range(0, columns, PART)
        ]
        return tuple(Result(*part, n % HALVES) for n, part in enumerate(parts))

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that a thread of the reduce role has: a pair's two threads share a row."""
        return self.d // self.ctas

    @property
    def added(self) -> int:
        """Columns of dQ staged at a time: rows of 128 bytes, or of 64. A pair's must end where
        those of the row's other thread begin; else TMA clips what is behind the last column."""
        return 32 if self.ctas == 1 or self.dq_columns % 32 == 0 else 16

    @property
    def added_stages(self) -> int:
        """As many as fit."""
        return 2 if self.ctas == 1 or self.d + self.d_v <= 192 else 1

    @property
    def dq_groups(self) -> tuple[tuple[int, ...], ...]:
        """Parts of dQ that a thread of the reduce role holds at once."""
        parts, most = range(-(-self.dq_columns // self.added)), 1 if self.derivative else 4
        return tuple(tuple(parts[i : i + most]) for i in parts[::most])

    @property
    def parts_ahead(self) -> tuple[int, ...]:
        """How many parts of dQ TMA may still be reading when each one is staged: the first part of
        a block, if parts are odd in number, is staged where the last one before it was."""
        parts, stages = sum(map(len, self.dq_groups)), self.added_stages
        return tuple(0 if part == 0 and parts % stages else stages - 1 for part in range(parts))

    @property
    def dq_inside(self) -> str | None:
        """The region of tensor memory where dQ lies; None: it has columns of its own."""
        if 2 * TILE + self.d_v + self.d + self.dq_columns <= Limits().tmem_columns:
            return None
        return "grads" if self.ctas == 1 else "scores"

    @cached_property
    def pipeline(self) -> Pipeline:
        tma, commit, warps = How.TMA, How.COMMIT, How.WARPS
        reduce, compute, others = self.registers
        row_stages = 2  # LSE and delta of this block, and of the next one
        q_stages = 3 - self.ctas  # Q of this block, for dK, and of the next one, for S
        return Pipeline(
            roles=(
                Role("reduce", 0, 4, registers=reduce),
                Role("compute", 4, 4, copies=HALVES, registers=compute),
                Role("mma", 12, 1, registers=others, leader=True),
                Role("load", 13, 1, registers=others),
                *self._rest(others),
            ),
            signals=(
                Signal("k_full", (("load", tma),), "mma"),
                Signal("k_empty", (("mma", commit),), "load", passed=True),
                Signal("v_full", (("load", tma),), "mma"),
                Signal("v_empty", (("mma", commit),), "load", passed=True),
                Signal("q_full", (("load", tma),), "mma", stages=q_stages),
                Signal("q_empty", (("mma", commit),), "load", stages=q_stages, passed=True),
                Signal("do_full", (("load", tma),), "mma"),
                Signal("do_empty", (("mma", commit),), "load", passed=True),
                Signal("rows_full", (("load", tma),), "compute", stages=row_stages),
                Signal("s_full", (("mma", commit),), "compute"),
                Signal("p_ready", (("compute", warps),), "mma"),
                Signal("dp_full", (("mma", commit),), "compute"),
                Signal("ds_ready", (("compute", warps),), "mma"),
                Signal("dq_full", (("mma", commit),), "reduce"),
                Signal("dq_empty", (("reduce", warps),), "mma", passed=True),
                Signal("grads_full", (("mma", commit),), "compute"),
                *(self._signals_of_pairs if self.pair else ()),
            ),
            smem=(
                Region("k", TILE * self.d * 2, align=1024),
                Region("v", TILE * self.d_v * 2, align=1024),
                Region("q", self.rows * self.d * 2, stages=q_stages, align=1024),
                Region("do", self.rows * self.d_v * 2, align=1024),
                *self._by_columns(q_stages),
                # see `ds_stage`; behind the last block, dK and dV are staged there
                Region("ds", TILE * HALF * 2, stages=3 if self.pair else HALVES, align=1024),
                Region("added", TILE * self.added * 4, stages=self.added_stages, align=1024),
                Region("rows", 2 * TILE * 4, stages=row_stages, align=16),  # LSE and delta
                Region("barriers", 256, align=16),
                Region("address", 16, align=16),
            ),
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
        between = self.dq_inside == "scores"  # dQ, the halves of P
        halves = {"stages": HALVES, "stride": HALF}
        at_the_ends = {"stages": HALVES, "stride": TILE - HALF // 2}
        return (
            Region("scores", TILE),
            Region("s", HALF, inside="scores", **halves),
            Region("p", HALF // 2, inside="scores", **(at_the_ends if between else halves)),
            Region("dv", self.d_v),
            Region("grads", TILE),
            Region("dp", HALF, inside="grads", **halves),
            Region("ds_t", HALF // 2, inside="grads", **halves),
            Region("dk", self.d),
            Region(
                "dq", self.dq_columns, inside=self.dq_inside, offset=HALF // 2 if between else 0
            ),
        )


def ds_stage(pair: bool, cta: Any, half: Any) -> Any:
    """Where dS of half of the queries lies in shared memory. In a pair, stages are the tiles of
    keys, of the queries for which the CTA forms dQ; from the third one the rest is copied to the
    peer."""
    return cta + (half ^ cta) * (2 - cta) if pair else half
