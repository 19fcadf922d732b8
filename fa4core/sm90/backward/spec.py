"""What a Hopper backward kernel is compiled for, and the pipeline that follows from it.

Plain values: nothing here imports the DSL. The protocol in words: a producer warp brings K and V of
a work tile, and Q and dO, each in a ring of its own, for every query tile that it visits. Consumer
warpgroups compute S^T and dP^T, keep dK and dV in registers, and meet over dS in shared memory,
because dQ is a sum over all keys. They issue S of the next query tile together with dQ and dK of
this one, and compute the next P while the tensor core works on dK and the next dP. They add dQ to
global memory themselves, or one warp does by bulk copies, which can wait for its turn.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import attrs

from fa4core.backward.rule import Rule
from fa4core.backward.spec import BackwardSpec
from fa4core.pipeline.declare import How, Pipeline, Region, Role, Signal
from fa4core.sm90.backward.tuning import Shape
from fa4core.sm90.boxes import inside_boxes

GRAD_S = 2  # tiles of dS in shared memory
ROWS = 64  # M of every wgmma: keys of a tile, and queries of a warpgroup's part of dQ


@attrs.frozen(slots=False)
class Spec(BackwardSpec):
    """A Hopper backward kernel.

    Attributes:
        shape: Tiles, stages and registers; see `tuning`.
    """

    shape: Shape
    target: str = attrs.field(default="sm90", kw_only=True)

    listed = True

    def __attrs_post_init__(self) -> None:
        least = self.queries if self.shape.shared else 16
        if not least <= self.shape.early <= self.queries:
            raise ValueError(f"{self.shape}: early may be {least} to {self.queries}")
        if self.queries != ROWS and not self.by_rows:
            raise ValueError(
                f"{self.shape}: {ROWS} queries, or {ROWS} for each warpgroup if each has a key "
                "tile of its own, are possible"
            )
        if self.held and (self.parts > 1 or self.shape.passes > 1 or self.differentiates):
            raise ValueError(
                f"{self.shape}: dS can be held in registers where each warpgroup has a key tile of "
                "its own, dQ goes in one pass and no score mod has a derivative"
            )

    @property
    def tiles(self) -> int:
        """Key tiles of a work tile, side by side."""
        return 1 if self.shape.shared else self.shape.groups

    @property
    def keys(self) -> int:
        return ROWS

    @property
    def queries(self) -> int:
        return self.shape.queries

    @property
    def d(self) -> int:
        """Head dim of the tiles; what a product takes of it is a multiple of 16."""
        parts = self.shape.groups * self.shape.passes
        return _up(self.head_dim, 16 * (1 if self.by_rows else parts))

    @property
    def d_v(self) -> int:
        return _up(self.head_dim_v, 16 * self.parts)

    @property
    def parts(self) -> int:
        """Among how many warpgroups the work on one key tile is divided."""
        return self.shape.groups // self.tiles

    def tile_of(self, t: Any) -> Any:
        """Which of the key tiles warpgroup `t` works on."""
        return t if self.parts == 1 else 0

    def part_of(self, t: Any) -> Any:
        """Which part of the work on its key tile warpgroup `t` does."""
        return 0 if self.parts == 1 else t

    @property
    def by_rows(self) -> bool:
        """Whether a warpgroup's part of dQ is a part of the queries; else of the head dim."""
        return self.parts == self.shape.passes == 1 and self.queries == ROWS * self.shape.groups

    @cached_property
    def differentiates(self) -> bool:
        """Whether the score mod has a derivative: scores are then computed once more for it."""
        return not Rule.parse(self.graph).is_identity

    @property
    def late(self) -> bool:
        """Whether a part of dV is begun behind dS only, where P still is."""
        return self.shape.early < self.queries and not self.differentiates and not self.held

    @property
    def ahead(self) -> bool:
        """Whether there are registers for LSE and delta before they are needed."""
        few = self.queries // self.parts <= ROWS
        return few and not self.differentiates and not self.held

    @property
    def held(self) -> bool:
        """Whether dS, rounded, stays in registers for dK, and not only in shared memory for dQ."""
        return self.shape.held

    @property
    def roomy(self) -> bool:
        """Whether there are registers for dP while dS of the query tile before is still read; what
        is enough, here and below, is what ptxas takes without making products synchronous."""
        return self._left - self.queries // 4 >= 32

    @property
    def tight(self) -> bool:
        """Whether not even for S."""
        return self._left < 40

    @property
    def _left(self) -> int:
        """Registers of a thread beside S, dP, dK and dV."""
        return self.shape.consumer - self.queries - (self.d + self.d_v) // 2

    def steps(self, part: int) -> range:
        """Of the sum over queries that dV is, 16 a step: those begun before dS, and behind it."""
        early = (self.shape.early if self.late else self.queries) // 16
        return range(early, self.queries // 16) if part else range(early)

    @property
    def grad_q_columns(self) -> int:
        """Columns of a warpgroup's part of dQ, which has 64 rows, in one pass."""
        return self.d // (1 if self.by_rows else self.shape.groups * self.shape.passes)

    @property
    def staged(self) -> bool:
        """Whether dQ goes through shared memory to a role that adds it; else consumers do."""
        return self.deterministic or not self.shape.direct

    @property
    def apart(self) -> bool:
        """Whether dV fits into dS's place on its way out, or goes through dQ's like dK, behind it.
        K and V are not in the way of those of the next tile."""
        weights = ROWS * self.tiles * self.queries
        return self.shape.groups == GRAD_S and ROWS * self.d_v // self.parts <= weights

    @cached_property
    def loaded(self) -> dict[str, int]:
        """Columns that TMA brings of each operand; those behind stay zero."""
        k, q, out = self.grad_q_columns, self.d // self.parts, self.d_v // self.parts
        return {
            "k": inside_boxes(self.head_dim, k),
            "v": inside_boxes(self.head_dim_v, self.d_v),
            "q": inside_boxes(self.head_dim, q),
            "grad_out": inside_boxes(self.head_dim_v, out),
        }

    @property
    def pads(self) -> bool:
        """Whether operands have columns that nothing is loaded to."""
        return self.loaded != {"k": self.d, "v": self.d_v, "q": self.d, "grad_out": self.d_v}

    @property
    def stored(self) -> dict[str, tuple[int, int]]:
        """Of dK and dV: columns, and those of a warpgroup's part."""
        return {
            "k": (self.head_dim, self.d // self.parts),
            "v": (self.head_dim_v, self.d_v // self.parts),
        }

    @property
    def sums_part(self) -> int:
        return self.grad_q_columns

    @cached_property
    def pipeline(self) -> Pipeline:
        shape, tma, warps = self.shape, How.TMA, How.WARPS
        groups, parts, staged = shape.groups, self.parts, self.staged

        def one_each(name: str, by: str, to: str, passed: bool = False) -> Signal:
            return Signal(name, ((by, warps),), to, copies=groups, passed=passed)

        def among(name: str, stages: int = 1) -> Signal:
            """All consumers have come so far."""
            return Signal(name, (("consumer", warps),), "consumer", stages=stages)

        return Pipeline(
            roles=(
                Role("load", 0, 1, registers=shape.producer),
                *((Role("reduce", 1, 1, registers=shape.producer),) if staged else ()),
                Role("spare", 1 + staged, 3 - staged, registers=shape.producer),  # to fill up
                Role("consumer", 4, 4, copies=groups, registers=shape.consumer),
            ),
            signals=(
                Signal("kv_full", (("load", tma),), "consumer"),
                Signal("kv_empty", (("consumer", warps),), "load", passed=True),
                *_ring("q", shape.stages),
                *_ring("grad_out", shape.stages_out),
                *((among("p_full", stages=2),) if parts > 1 else ()),
                among("grad_s_full", stages=GRAD_S),
                among("grad_s_read"),
                among("grad_v_stored"),
                *(
                    (
                        Signal("grad_q_full", (("consumer", warps),), "reduce", copies=groups),
                        Signal("grad_q_empty", (("reduce", warps),), "consumer", copies=groups),
                    )
                    if staged
                    else ()
                ),
            ),
            smem=self._shared(),
            rmem=self._registers(),
        )

    def _shared(self) -> tuple[Region, ...]:
        shape, parts = self.shape, self.parts
        groups, keys = range(shape.groups), ROWS * self.tiles
        weights = keys * self.queries * 2
        part = keys * self.queries * 2 // shape.groups
        grad_k, grad_v = (ROWS * d // parts * 2 for d in (self.d, self.d_v))
        sums_q, through = ROWS * self.grad_q_columns * 4, 0 if self.apart else grad_v
        rows = self.queries * 4
        return (
            Region("barriers", 512, align=1024),
            Region("lse", rows, stages=shape.stages, align=128),
            Region("delta", rows, stages=shape.stages_out, align=128),
            Region("k", keys * self.d * 2, align=1024),
            Region("v", keys * self.d_v * 2, align=1024),
            Region("q", self.queries * self.d * 2, stages=shape.stages, align=1024),
            Region("grad_out", self.queries * self.d_v * 2, stages=shape.stages_out, align=1024),
            Region("grad_s", weights, stages=GRAD_S, align=1024),
            *(Region(f"grad_s{t}", part, GRAD_S, inside="grad_s", offset=t * part) for t in groups),
            *((Region("p", weights, stages=2, align=1024),) if parts > 1 else ()),
            *(Region(f"p{t}", part, 2, inside="p", offset=t * part) for t in groups if parts > 1),
            Region("grad_q", max(sums_q, grad_k, through), stages=shape.groups, align=1024),
            Region("grad_k", grad_k, stages=shape.groups, inside="grad_q"),
            Region(
                "grad_v", grad_v, stages=shape.groups, inside="grad_s" if self.apart else "grad_q"
            ),
        )

    def _registers(self) -> tuple[Region, ...]:
        groups, parts = self.shape.groups, self.parts
        scores = ROWS * self.queries // parts
        sums_q = ROWS * self.grad_q_columns
        held = attrs.evolve(Region("sums_q", sums_q, stages=groups))
        if sums_q <= scores:  # they are never needed at the same time
            held = attrs.evolve(held, inside="dp")
        return (
            Region("s", scores, stages=groups),
            Region("dp", scores, stages=groups),
            Region("sums_k", ROWS * self.d // parts, stages=groups),
            Region("sums_v", ROWS * self.d_v // parts, stages=groups),
            held,
            *(
                Region(f"weights{part}", ROWS * 16 * len(self.steps(part)) // 2, stages=groups)
                for part in (range(1 + self.late) if parts == 1 else ())
            ),
            *((Region("held", ROWS * self.queries // 2, stages=groups),) if self.held else ()),
        )


def _ring(name: str, stages: int) -> tuple[Signal, Signal]:
    """Tiles that the load role brings and consumers free."""
    return (
        Signal(f"{name}_full", (("load", How.TMA),), "consumer", stages=stages),
        Signal(f"{name}_empty", (("consumer", How.WARPS),), "load", stages=stages, passed=True),
    )


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
