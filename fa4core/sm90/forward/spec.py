"""What a Hopper forward kernel is compiled for, and the pipeline that follows from it.

Plain values: nothing here imports the DSL. The protocol in words: a producer warp brings Q of every
consumer warpgroup, and K and V block by block, each in a ring of its own. A consumer warpgroup owns
64 queries. It issues S of the next block and O += P V of this one together, waits for S only, and
computes the next P while the tensor core still works on O (FlashAttention-3, section 3.2). The
consumers take turns at issuing (section 3.1), so that one computes exponentials while another's
products run.
"""

from __future__ import annotations

from functools import cached_property

import attrs

from fa4core.forward.spec import ForwardSpec
from fa4core.pipeline.declare import How, Limits, Pipeline, Region, Role, Signal
from fa4core.pipeline.layout import place as placed_in
from fa4core.sm90.forward.tuning import Shape

ROWS = 64  # queries of a warpgroup: M of every wgmma


@attrs.frozen(slots=False)
class Spec(ForwardSpec):
    """A Hopper forward kernel.

    Attributes:
        shape: Tile, stages and registers; see `tuning`.
        row_max: Whether row maxima are wanted; else what is written is no more than a lower bound.
    """

    shape: Shape
    row_max: bool = True
    target: str = attrs.field(default="sm90", kw_only=True)

    @property
    def tiles(self) -> int:
        """Query tiles side by side: consumer warpgroups."""
        return self.shape.groups

    @property
    def dynamic(self) -> bool:
        """Whether work tiles come from a queue; Hopper has none in hardware."""
        return False

    @property
    def tile(self) -> int:
        return ROWS

    @property
    def block(self) -> int:
        return self.shape.keys

    @cached_property
    def pipeline(self) -> Pipeline:
        tiles, stages = self.tiles, self.shape.stages
        tma, warps = How.TMA, How.WARPS
        turn = Signal("turn", (("consumer", How.THREADS),), "consumer", copies=tiles, named=True)
        return Pipeline(
            roles=(
                Role("load", 0, 1, registers=self.shape.producer),
                Role("spare", 1, 3, registers=self.shape.producer),  # fills the warpgroup
                Role("consumer", 4, 4, copies=tiles, registers=self.shape.consumer),
            ),
            signals=(
                Signal("q_full", (("load", tma),), "consumer", copies=tiles),
                Signal("q_empty", (("consumer", warps),), "load", copies=tiles, passed=True),
                Signal("k_full", (("load", tma),), "consumer", stages=stages),
                Signal("k_empty", (("consumer", warps),), "load", stages=stages, passed=True),
                Signal("v_full", (("load", tma),), "consumer", stages=stages),
                Signal("v_empty", (("consumer", warps),), "load", stages=stages, passed=True),
                *((turn,) if self.shape.turns and tiles > 1 else ()),
            ),
            smem=self._shared(apart=self._bytes(apart=True) <= Limits().smem_bytes),
            rmem=(
                Region("s", ROWS * self.block, stages=tiles),
                Region("p", ROWS * self.block // 2, stages=tiles),
                Region("next", ROWS * self.block // 2, stages=tiles),
                Region("o", ROWS * self.d_v, stages=tiles),
            ),
        )

    def _shared(self, apart: bool) -> tuple[Region, ...]:
        """Regions of shared memory; finished rows have one of their own only if it fits, and none
        if they are those of a share of the keys, in float32."""
        rows = Region("rows", ROWS * self.d_v * 2, stages=self.tiles, align=1024)
        q_bytes = ROWS * (self.d if apart else max(self.d, self.d_v)) * 2
        place = rows if apart else attrs.evolve(rows, inside="q", align=1)
        return (
            Region("barriers", 512, align=1024),
            Region("q", q_bytes, stages=self.tiles, align=1024),
            *(() if self.split else (place,)),
            Region("k", self.block * self.d * 2, stages=self.shape.stages, align=1024),
            Region("v", self.block * self.d_v * 2, stages=self.shape.stages, align=1024),
        )

    def _bytes(self, apart: bool) -> int:
        placed = placed_in(self._shared(apart), 1 << 30, "bytes")
        return max(p.offset + p.stride * p.region.stages for p in placed.values())
