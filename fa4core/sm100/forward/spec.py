"""What a forward kernel is compiled for, and the pipeline that follows from it.

Plain values: nothing here imports the DSL. `kernel` compiles a `Spec`; tests and the checker read
its pipeline. The protocol in words: the MMA warp issues S = Q K^T of both query tiles, then block
by block (P0 V, next S0), (P1 V, next S1). One thread issues them and the tensor core runs them in
order, so "S of block i + 1 is there" also says that P V of block i is done: the correction role
may touch O as soon as the softmax role has posted the statistics of block i + 1, and S may be
overwritten because the P V that read its alias P was issued before.
"""

from __future__ import annotations

import hashlib
from functools import cached_property

import attrs

from fa4core.pipeline.declare import How, Limits, Pipeline, Region, Role, Signal
from fa4core.pipeline.layout import Placed, place
from primitives.exp import Exp

TILE = 128  # queries of a tile and keys of a block
PARTS = 4  # P is written in quarters; the last one has a signal of its own
LAST = TILE // 2 // PARTS  # columns of tensor memory of a part of P

ANSWER_BYTES = 16  # of the work queue
AHEAD = 2  # tiles that the work queue is asked for before the slowest role is done with its own

MAX_HEAD_DIM = 256


@attrs.frozen(slots=False)
class Spec:
    """A forward kernel.

    Attributes:
        graph: Mask, score mod and sink as canonical text (`VariantGraph.dump`).
        dtype: "bfloat16" or "float16".
        head_dim, head_dim_v: Of the problem.
        tiles: Query tiles side by side, 1 or 2.
        exp: How exponentials are computed.
        threshold: Growth of a row's maximum, log2 domain, that is left unapplied.
        negative_scale: Whether the run-time scale may be 0 or below: the maximum of scaled scores
            is then not the scaled maximum of scores.
        packed: Query heads packed into the rows of a tile, a divisor of the group; 1: none.
        dynamic: Whether work tiles come from a queue and not from a list known at launch.
        target: Name of the target.
    """

    graph: str
    dtype: str
    head_dim: int
    head_dim_v: int
    tiles: int = 2
    exp: Exp = attrs.field(factory=Exp)
    threshold: float = 8.0
    negative_scale: bool = False
    packed: int = 1
    dynamic: bool = False
    target: str = "sm100"

    def __str__(self) -> str:
        """An identifier: the DSL makes it part of the kernel's name."""
        return f"forward_{hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()}"

    @property
    def queries(self) -> int:
        """Of a tile."""
        return TILE // self.packed

    @property
    def rows(self) -> int:
        """Of a tile that are in use."""
        return self.queries * self.packed

    @property
    def d(self) -> int:
        """Head dim of the tiles: what an MMA step of 16 divides. TMA fills it up with zeros."""
        return -(-self.head_dim // 16) * 16

    @property
    def d_v(self) -> int:
        return -(-self.head_dim_v // 16) * 16

    @property
    def kv_bytes(self) -> int:
        """Of a stage of the ring that K and V share."""
        return TILE * max(self.d, self.d_v) * 2

    @property
    def kv_stages(self) -> int:
        """As many as fit beside Q, at most 6; V of a block and K of the next are used at once."""
        room = Limits().smem_bytes - 5 * 1024 - self.tiles * TILE * self.d * 2
        return min(6, room // self.kv_bytes)

    @property
    def _queue(self) -> tuple[Signal, ...]:
        """Signals of the work queue: its answers go to every role, and each takes every one."""
        if not self.dynamic:
            return ()
        roles = ("softmax", "correction", "mma", "load", "scheduler")
        by_all = tuple((role, How.WARPS) for role in roles)
        return (
            Signal("tile_known", (("scheduler", How.TMA),), roles, stages=AHEAD),
            Signal("tile_taken", by_all, "scheduler", stages=AHEAD, passed=True),
        )

    @cached_property
    def pipeline(self) -> Pipeline:
        tiles = self.tiles
        tma, commit, warps = How.TMA, How.COMMIT, How.WARPS
        kv = self.kv_stages
        return Pipeline(
            roles=(
                Role("softmax", 0, 4, copies=tiles, registers=192),
                Role("correction", 4 * tiles, 4, registers=64),
                Role("mma", 4 * tiles + 4, 1, registers=64),
                Role("load", 4 * tiles + 5, 1, registers=64),
                Role("scheduler", 4 * tiles + 6, 1, registers=64),  # idle without a queue
                Role("spare", 4 * tiles + 7, 1, registers=64),  # fills the warpgroup
            ),
            signals=(
                Signal("q_full", (("load", tma),), "mma", copies=tiles),
                Signal("q_empty", (("mma", commit),), "load", copies=tiles, passed=True),
                Signal("kv_full", (("load", tma),), "mma", stages=kv),
                Signal("kv_empty", (("mma", commit),), "load", stages=kv, passed=True),
                Signal("s_full", (("mma", commit),), "softmax", copies=tiles),
                # P V waits for both at once: P is written, and O is rescaled
                Signal("p_ready", (("softmax", warps), ("correction", warps)), "mma", copies=tiles),
                Signal("p_last", (("softmax", warps),), "mma", copies=tiles),
                Signal("stats_full", (("softmax", warps),), "correction", copies=tiles),
                Signal(
                    "stats_empty", (("correction", warps),), "softmax", copies=tiles, passed=True
                ),
                Signal("o_full", (("mma", commit),), "correction", copies=tiles),
                *self._queue,
            ),
            smem=(
                Region("barriers", 512, align=1024),
                Region("address", 16, align=16),
                Region("answers", ANSWER_BYTES, stages=AHEAD, align=16),
                Region("stats", 3 * TILE * 4, stages=tiles, align=16),
                Region("q", TILE * self.d * 2, stages=tiles, align=1024),
                Region("kv", self.kv_bytes, stages=kv, align=1024),
            ),
            tmem=(
                Region("s", TILE, stages=tiles),
                # two 16-bit values a column, in the second half of S, the last part by itself
                Region("p", TILE // 2 - LAST, stages=tiles, inside="s", offset=TILE // 2),
                Region("p_last", LAST, stages=tiles, inside="s", offset=TILE - LAST),
                Region("o", self.d_v, stages=tiles),
            ),
        )

    @cached_property
    def smem(self) -> dict[str, Placed]:
        return place(self.pipeline.smem, self.pipeline.limits.smem_bytes, "bytes")

    @cached_property
    def tmem(self) -> dict[str, Placed]:
        return place(self.pipeline.tmem, self.pipeline.limits.tmem_columns, "columns")

    @property
    def smem_bytes(self) -> int:
        return max(p.offset + p.stride * p.region.stages for p in self.smem.values())

    @property
    def tmem_columns(self) -> int:
        """To allocate: a power of two, at least 32."""
        used = max(p.end for p in self.tmem.values())
        return max(32, 1 << (used - 1).bit_length())
