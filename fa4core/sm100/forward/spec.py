"""What a forward kernel is compiled for, and the pipeline that follows from it.

Plain values: nothing here imports the DSL. `kernel` compiles a `Spec`; tests and the checker read
its pipeline. The protocol in words: the MMA warp issues S = Q K^T of both query tiles, then block
by block (P0 V, next S0), (P1 V, next S1). One thread issues them and the tensor core runs them in
order, so "S of block i + 1 is there" also says that P V of block i is done: the correction role
may touch O as soon as the softmax role has posted the statistics of block i + 1, and S may be
overwritten because the P V that read its alias P was issued before.

With two CTAs, a cluster works on one work tile. The first CTA's MMA warp issues products of 256
rows, 128 in each CTA; each loads its own Q, half of the keys of K and half of the columns of V, and
both work on the rows of their own.
"""

from __future__ import annotations

from functools import cached_property

import attrs

from fa4core.forward.spec import ForwardSpec
from fa4core.forward.work import ANSWER_BYTES
from fa4core.pipeline.declare import How, Limits, Pipeline, Region, Role, Signal
from fa4core.sm100.spec import InTensorMemory

TILE = 128  # queries of a tile and keys of a block
PARTS = 4  # P is written in quarters; the last one has a signal of its own
LAST = TILE // 2 // PARTS  # columns of tensor memory of a part of P

OUT_BYTES = 128  # of a row of O staged for a store: what one swizzle spans
AHEAD = 2  # tiles that the work queue is asked for before the slowest role is done with its own


@attrs.frozen(slots=False)
class Spec(InTensorMemory, ForwardSpec):
    """A Blackwell forward kernel.

    Attributes:
        tiles: Query tiles side by side in a CTA, 1 or 2.
        ctas: CTAs that share an MMA, 1 or 2.
        dynamic: Whether work tiles come from a queue and not from a list known at launch.
    """

    tiles: int = 2
    ctas: int = 1
    dynamic: bool = False
    target: str = attrs.field(default="sm100", kw_only=True)

    @property
    def tile(self) -> int:
        return TILE

    @property
    def block(self) -> int:
        return TILE

    @property
    def k_rows(self) -> int:
        """Keys of K, of which a CTA may hold but a share, that one copy brings."""
        return min(self.key_rows, self.keys)

    @property
    def d_v(self) -> int:
        """Head dim of V's tiles: every CTA has a multiple of 16 of its columns."""
        step = 16 * self.ctas
        return -(-self.head_dim_v // step) * step

    @property
    def keys(self) -> int:
        """Rows of K that a CTA holds of a tile."""
        return TILE // self.ctas

    @property
    def columns(self) -> int:
        """Columns of V that a CTA holds."""
        return self.d_v // self.ctas

    @property
    def side(self) -> int:
        """Query tiles of a work tile."""
        return self.tiles * self.ctas

    @property
    def kv_bytes(self) -> int:
        """Of a stage of the ring that K and V share, in each CTA."""
        return TILE * max(self.d, self.d_v) * 2 // self.ctas

    @property
    def kv_stages(self) -> int:
        """As many as fit beside Q, at most 6; V of a block and K of the next are used at once."""
        return self._kv_stages(self.out_stages)

    def _kv_stages(self, out_stages: int) -> int:
        room = Limits().smem_bytes - 3 * 1024 - out_stages * TILE * OUT_BYTES
        room -= self.tiles * TILE * self.d * 2
        return min(6, room // self.kv_bytes)

    @property
    def holds_k(self) -> bool:
        """Whether the ring is long enough to give K back late: `mma.MmaWork`."""
        return self.kv_stages >= 4

    @property
    def out_stages(self) -> int:
        """Two, so that one is filled while the other is stored, unless K and V need the room."""
        return 2 if self._kv_stages(2) >= 2 * self.ctas else 1

    @property
    def out_columns(self) -> int:
        """Columns of O that are staged at a time."""
        return OUT_BYTES // (4 if self.split else 2)

    @property
    def out_parts(self) -> int:
        return -(-self.d_v // self.out_columns)

    @property
    def _queue(self) -> tuple[Signal, ...]:
        """Signals of the work queue: its answers go to every role, and each takes every one."""
        if not self.dynamic:
            return ()
        roles = ("softmax", "correction", "mma", "load", "store", "scheduler")
        by_all = tuple((role, How.WARPS) for role in roles)
        return (
            Signal("tile_known", (("scheduler", How.TMA),), roles, stages=AHEAD),
            Signal("tile_taken", by_all, "scheduler", stages=AHEAD, passed=True),
        )

    @cached_property
    def pipeline(self) -> Pipeline:
        tiles = self.tiles
        tma, commit, warps = How.TMA, How.COMMIT, How.WARPS
        kv, out = self.kv_stages, self.out_stages
        # one query tile leaves more registers to each role
        softmax, correction, others = (192, 72, 56) if tiles == 2 else (240, 128, 96)
        return Pipeline(
            roles=(
                Role("softmax", 0, 4, copies=tiles, registers=softmax),
                Role("correction", 4 * tiles, 4, registers=correction),
                Role("mma", 4 * tiles + 4, 1, registers=others, leader=True),
                Role("load", 4 * tiles + 5, 1, registers=others),
                # idle without a queue
                Role("scheduler", 4 * tiles + 6, 1, registers=others, leader=True),
                Role("store", 4 * tiles + 7, 1, registers=others),
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
                Signal("out_full", (("correction", warps),), "store", stages=out),
                Signal("out_empty", (("store", warps),), "correction", stages=out, passed=True),
                *self._queue,
            ),
            smem=(
                Region("barriers", 512, align=16),
                Region("address", 16, align=16),
                Region("answers", ANSWER_BYTES, stages=AHEAD, align=16),
                Region("stats", 2 * TILE * 4, stages=tiles, align=16),
                Region("out", TILE * OUT_BYTES, stages=out, align=1024),
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
            ctas=self.ctas,
        )
