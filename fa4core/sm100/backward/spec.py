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
"""

from __future__ import annotations

from functools import cached_property

import attrs

from fa4core.backward.spec import BackwardSpec
from fa4core.pipeline.declare import How, Limits, Pipeline, Region, Role, Signal
from fa4core.pipeline.layout import place
from fa4core.sm100.backward.tuning import (
    ADDED,
    LANES,
    NARROW,
    STAGES,
    Launch,
    Share,
    Stages,
    groups,
    shares,
)
from fa4core.sm100.spec import InTensorMemory

TILE = 128  # keys of a work tile
HALVES = 2  # of a block's queries: one for each copy of the compute role
PART = 64  # columns of dK or dV staged at a time: rows of 128 bytes


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
        launch: Which gradients it computes.
    """

    derivative: bool = attrs.field(default=False, kw_only=True)
    launch: Launch = attrs.field(default="all", kw_only=True)
    target: str = attrs.field(default="sm100", kw_only=True)

    @property
    def keys(self) -> int:
        return TILE

    @property
    def wide(self) -> bool:
        """Whether dQ is computed transposed, for tiles of 64 queries."""
        return max(self.head_dim, self.head_dim_v) > NARROW

    @property
    def queries(self) -> int:
        return 64 if self.wide else 128

    @property
    def half(self) -> int:
        """Queries of a copy of the compute role."""
        return self.queries // HALVES

    @property
    def d(self) -> int:
        """Transposed, dQ takes whole groups of 128 columns, which begin at panels of 64."""
        return max(LANES, -(-self.head_dim // 64) * 64) if self.wide else super().d

    @property
    def launches(self) -> tuple[Spec, ...]:
        if self.launch != "all" or self._columns_of_all <= Limits().tmem_columns:
            return (self,)
        only_v = attrs.evolve(self, launch="dv", derivative=False)
        return only_v, attrs.evolve(self, launch="dk")

    @property
    def with_v(self) -> bool:
        """Whether dV is computed."""
        return self.launch != "dk"

    @property
    def with_k(self) -> bool:
        """Whether dK and dQ are computed."""
        return self.launch != "dv"

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of the reduce role, which takes a row of dQ at once; of the compute role; of others."""
        if not self.derivative:
            return 152, 136, 88
        return (88, 168, 88) if self.wide else (72, 192, 56)

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
    def shares(self) -> tuple[Share, ...]:
        """dQ of a block as it is added."""
        return shares(self.d, self.queries, self.wide)

    @property
    def dq_groups(self) -> tuple[tuple[int, ...], ...]:
        """Parts of dQ that a thread of the reduce role holds at once."""
        parts, most = range(len(self.shares)), 1 if self.derivative else 4
        return tuple(tuple(parts[i : i + most]) for i in parts[::most])

    @property
    def parts_ahead(self) -> tuple[int, ...]:
        """How many parts of dQ TMA may still be reading when each one is staged: the first part of
        a block, if parts are odd in number, is staged where the last one before it was."""
        parts, stages = len(self.shares), self.stages.added
        return tuple(0 if part == 0 and parts % stages else stages - 1 for part in range(parts))

    @property
    def dq_firsts(self) -> tuple[int, ...]:
        """Where the head dim's columns begin that each product for dQ gives."""
        return groups(self.d) if self.wide else (0,)

    @property
    def dq_columns(self) -> int:
        """Of dQ in tensor memory."""
        return len(self.dq_firsts) * self.queries if self.wide else self.d

    @property
    def _columns_of_all(self) -> int:
        """Of tensor memory, if dQ has none of its own."""
        return self.d + self.d_v + self.queries + max(self.queries, self.dq_columns)

    @property
    def dq_apart(self) -> bool:
        """Whether dQ has columns of its own."""
        grads = self.d_v * self.with_v + self.d
        return 2 * self.queries + grads + self.dq_columns <= Limits().tmem_columns

    @cached_property
    def stages(self) -> Stages:
        """Lengths of rings in shared memory: the first choice that fits."""
        limit = Limits().smem_bytes
        fits = (s for s in STAGES if _bytes(self._shared(s)) <= limit)
        return next(fits, STAGES[-1])

    @property
    def ahead(self) -> bool:
        """Whether S of the next block is computed before dK of this one."""
        return self.stages.q > 1

    @cached_property
    def pipeline(self) -> Pipeline:
        reduce, compute, others = self.registers
        return Pipeline(
            roles=(
                Role("reduce", 0, 4, registers=reduce),
                Role("compute", 4, 4, copies=HALVES, registers=compute),
                Role("mma", 12, 1, registers=others),
                Role("load", 13, 1, registers=others),
                Role("spare", 14, 2, registers=others),  # fill the warpgroup
            ),
            signals=self._signals(),
            smem=self._shared(self.stages),
            tmem=self._columns(),
        )

    def _signals(self) -> tuple[Signal, ...]:
        tma, commit, warps, stages = How.TMA, How.COMMIT, How.WARPS, self.stages
        of_k = (
            Signal("v_full", (("load", tma),), "mma"),
            Signal("v_empty", (("mma", commit),), "load", passed=True),
            Signal("dp_full", (("mma", commit),), "compute"),
            Signal("ds_ready", (("compute", warps),), "mma"),
            Signal("dq_full", (("mma", commit),), "reduce"),
            Signal("dq_empty", (("reduce", warps),), "mma", passed=True),
        )
        # results are staged where the other copy's dS lies
        shared = (Signal("staged_read", (("compute", warps),), "compute"),)
        return (
            Signal("k_full", (("load", tma),), "mma"),
            Signal("k_empty", (("mma", commit),), "load", passed=True),
            Signal("q_full", (("load", tma),), "mma", stages=stages.q),
            Signal("q_empty", (("mma", commit),), "load", stages=stages.q, passed=True),
            Signal("do_full", (("load", tma),), "mma"),
            Signal("do_empty", (("mma", commit),), "load", passed=True),
            Signal("rows_full", (("load", tma),), "compute", stages=stages.q),
            Signal("s_full", (("mma", commit),), "compute"),
            Signal("p_ready", (("compute", warps),), "mma"),
            Signal("grads_full", (("mma", commit),), "compute"),
            *(of_k if self.with_k else ()),
            *(shared if self.with_k and self.wide else ()),
        )

    def _shared(self, stages: Stages) -> tuple[Region, ...]:
        queries = self.queries
        of_k = (
            Region("v", TILE * self.d_v * 2, align=1024),
            Region("added", TILE * ADDED * 4, stages=stages.added, align=1024),
            # of 64 queries the halves lie side by side in rows of 128 bytes, not like this
            Region("ds", TILE * self.half * 2, stages=HALVES, inside="results"),
        )
        part = TILE * PART * 2
        return (
            Region("k", TILE * self.d * 2, align=1024),
            Region("q", queries * self.d * 2, stages=stages.q, align=1024),
            Region("do", queries * self.d_v * 2, align=1024),
            Region("results", part * stages.staged, align=1024),
            Region("staged", part, stages=stages.staged, inside="results", align=1024),
            *(of_k if self.with_k else ()),
            Region("rows", 2 * queries * 4, stages=stages.q, align=16),  # LSE and delta
            Region("barriers", 256, align=16),
            Region("address", 16, align=16),
        )

    def _columns(self) -> tuple[Region, ...]:
        """Everything by halves of the queries is in stages: each copy of the compute role reads its
        half, and overwrites it with 16-bit values, two a column, whatever the other one does."""
        half, together = self.half, max(self.queries, self.dq_columns)
        of_dq = (Region("dq", self.dq_columns if self.dq_apart else together),)
        of_dp = (
            Region("dp", half, stages=HALVES, inside=None if self.dq_apart else "dq"),
            Region("ds_t", half // 2, stages=HALVES, inside="dp"),
        )
        return (
            Region("s", half, stages=HALVES),
            Region("p", half // 2, stages=HALVES, inside="s"),
            *((Region("dv", self.d_v),) if self.with_v else ()),
            *((*of_dq, *of_dp, Region("dk", self.d)) if self.with_k else ()),
        )


def _bytes(regions: tuple[Region, ...]) -> int:
    """Of regions, laid out without a limit."""
    return max(p.end for p in place(regions, 1 << 30, "bytes").values())
