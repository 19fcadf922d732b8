"""The backward's shared memory: what it has besides operands."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute

from fa4core.pipeline.declare import WARP
from fa4core.sm100 import memory
from fa4core.sm100.backward.spec import ds_stage
from fa4core.sm100.peer import ToPeer


class Memory(memory.Memory):
    """A CTA's shared memory, from where it begins."""

    @property
    def numbers(self) -> cute.Tensor:
        """LSE and delta of a block's queries: (queries, {LSE, delta}, stage)."""
        placed, queries = self.spec.smem["rows"], self.spec.queries
        layout = cute.make_layout(
            (queries, 2, placed.region.stages), stride=(1, queries, placed.stride // 4)
        )
        return cute.make_tensor(self.at("rows", cutlass.Float32), layout)

    def to_peer(self, cta: Any, thread: Any) -> ToPeer:
        """The copy of the rows of dS that the warp of `thread` has, of the half of the queries for
        which the peer forms dQ."""
        ds, nbytes = self.at("ds", cutlass.Uint8), WARP * self.spec.half * 2
        warp = cute.arch.make_warp_uniform(thread // WARP) * nbytes
        stage = self.spec.smem["ds"].stride
        of = ds + (ds_stage(True, cta, 1 - cta) * stage + warp)
        return ToPeer(of, ds + (cta * stage + warp), nbytes)
