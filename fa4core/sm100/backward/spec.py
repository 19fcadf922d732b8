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
"""

from __future__ import annotations

from functools import cached_property

import attrs

from fa4core.backward.spec import BackwardSpec
from fa4core.pipeline.declare import How, Limits, Pipeline, Region, Role, Signal
from fa4core.sm100.spec import InTensorMemory

TILE = 128  # keys of a work tile and queries of a block
HALVES = 2  # of a block's queries: one for each copy of the compute role
HALF = TILE // HALVES
PART = 64  # columns of dK or dV staged at a time: rows of 128 bytes
ADDED, ADDED_STAGES = 32, 2  # columns of dQ staged at a time: rows of 128 bytes
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
    def registers(self) -> tuple[int, int, int]:
        """Of the reduce role, which takes a row of dQ at once; of the compute role; of others."""
        return (72, 192, 56) if self.derivative else (152, 136, 88)

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
    def dq_groups(self) -> tuple[tuple[int, ...], ...]:
        """Parts of dQ that a thread of the reduce role holds at once."""
        parts, most = range(-(-self.d // ADDED)), 1 if self.derivative else 4
        return tuple(tuple(parts[i : i + most]) for i in parts[::most])

    @property
    def parts_ahead(self) -> tuple[int, ...]:
        """How many parts of dQ TMA may still be reading when each one is staged: the first part of
        a block, if parts are odd in number, is staged where the last one before it was."""
        parts = sum(map(len, self.dq_groups))
        most = ADDED_STAGES - 1
        return tuple(0 if part == 0 and parts % ADDED_STAGES else most for part in range(parts))

    @property
    def dq_apart(self) -> bool:
        """Whether dQ has columns of its own."""
        return 2 * TILE + self.d_v + 2 * self.d <= Limits().tmem_columns

    @cached_property
    def pipeline(self) -> Pipeline:
        tma, commit, warps = How.TMA, How.COMMIT, How.WARPS
        reduce, compute, others = self.registers
        q_stages = 2  # Q of this block, for dK, and of the next one, for S
        return Pipeline(
            roles=(
                Role("reduce", 0, 4, registers=reduce),
                Role("compute", 4, 4, copies=HALVES, registers=compute),
                Role("mma", 12, 1, registers=others),
                Role("load", 13, 1, registers=others),
                Role("spare", 14, 2, registers=others),  # fill the warpgroup
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
                Signal("rows_full", (("load", tma),), "compute", stages=q_stages),
                Signal("s_full", (("mma", commit),), "compute"),
                Signal("p_ready", (("compute", warps),), "mma"),
                Signal("dp_full", (("mma", commit),), "compute"),
                Signal("ds_ready", (("compute", warps),), "mma"),
                Signal("dq_full", (("mma", commit),), "reduce"),
                Signal("dq_empty", (("reduce", warps),), "mma", passed=True),
                Signal("grads_full", (("mma", commit),), "compute"),
            ),
            smem=(
                Region("k", TILE * self.d * 2, align=1024),
                Region("v", TILE * self.d_v * 2, align=1024),
                Region("q", TILE * self.d * 2, stages=q_stages, align=1024),
                Region("do", TILE * self.d_v * 2, align=1024),
                # by halves of the queries; behind the last block, dK and dV are staged there
                Region("ds", TILE * HALF * 2, stages=HALVES, align=1024),
                Region("added", TILE * ADDED * 4, stages=ADDED_STAGES, align=1024),
                Region("rows", 2 * TILE * 4, stages=q_stages, align=16),  # LSE and delta
                Region("barriers", 256, align=16),
                Region("address", 16, align=16),
            ),
            tmem=self._columns,
        )

    @property
    def _columns(self) -> tuple[Region, ...]:
        """Everything by halves of the queries is in stages: each copy of the compute role reads its
        half, and overwrites it with 16-bit values, two a column, whatever the other one does."""
        of_q = Region("dq", self.d // 2, stages=2)
        in_dp = Region("dq", HALF, stages=HALVES, inside="dp")
        return (
            Region("s", HALF, stages=HALVES),
            Region("p", HALF // 2, stages=HALVES, inside="s"),
            Region("dv", self.d_v),
            Region("dp", HALF, stages=HALVES),
            Region("ds_t", HALF // 2, stages=HALVES, inside="dp"),
            of_q if self.dq_apart else in_dp,
            Region("dk", self.d),
        )
