"""How the compute role ends a work tile: dK and dV to global memory.

A warp stages its 32 keys where dS was, 64 columns at a time, and stores them by TMA, which clips
what is behind the sequence's end. The warpgroups take parts in turn.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute

from fa4core.forward.tma import Operand
from fa4core.pipeline.declare import WARP
from fa4core.pipeline.effects import Fixed, drains, reads, touches, writes
from fa4core.sm100 import tmem
from fa4core.sm100.backward.spec import PART, Result, Spec
from fa4core.sm100.backward.tiles import TILE
from fa4core.sm100.memory import DTYPES

PIECE = 16  # columns at a time


class Finish(Fixed):
    """What a compute thread does with its key's dK and dV.

    Attributes:
        thread: 0..127 within the warpgroup.
        tmem: Address of each region of tensor memory, by name and stage.
        staged: The row in shared memory, at the warpgroup's stage.
        stores: By "dk" and "dv": of (rows, d, heads_kv, batch, shift).
        scale: Run-time factor on q . k.
    """

    def __init__(self, spec: Spec, thread, tmem, staged, stores: dict[str, Operand], scale):
        self.spec, self.thread, self.tmem, self.staged = spec, thread, tmem, staged
        self.stores, self.scale = stores, scale
        self.dtype, self.results = DTYPES[spec.dtype], spec.results

    @touches(lambda stage, result, item: (reads(result.name), writes("staged", stage)))
    def stage(self, stage: Any, result: Result, item: Any) -> None:
        """Part of a key's row, to shared memory."""
        values = cute.make_rmem_tensor(cute.make_layout(PIECE), cutlass.Float32)
        for first in range(0, result.columns, PIECE):
            place = tmem.columns(self.tmem[result.name](0) + result.first + first, PIECE)
            tmem.load(place, values, self.thread)
            cute.arch.fence_view_async_tmem_load()
            if result.name == "dk":
                for i in range(PIECE):
                    values[i] = values[i] * self.scale
            self._write(first, values, item)
        self._show()

    @touches(lambda stage, result, item: (writes("staged", stage),))
    def stage_zeros(self, stage: Any, result: Result, item: Any) -> None:
        """Of a key that no query attends to."""
        values = cute.make_rmem_tensor(cute.make_layout(PIECE), cutlass.Float32)
        values.fill(0.0)
        for first in range(0, result.columns, PIECE):
            self._write(first, values, item)
        self._show()

    @touches(lambda stage, result, item: (reads("staged", stage),), unit="store")
    def store(self, stage: Any, result: Result, item: Any) -> None:
        """The warp's rows of a part, begun."""
        warp = cute.arch.make_warp_uniform(self.thread // WARP)
        operand, key = self.stores[result.name], item.tile * TILE + warp * WARP
        there, row = operand.rows_of(item.b_k, item.h_kv, item.start_k, item.seqlen_k, key)
        operand.store(there, (row, result.first), (WARP, PART), (warp, stage))
        cute.arch.cp_async_bulk_commit_group()

    @drains("store")
    def settle(self, left: int) -> None:
        """Wait until TMA has read all staged parts but `left`."""
        cute.arch.cp_async_bulk_wait_group(left, read=True)
        cute.arch.sync_warp()

    def _write(self, first: int, values: cute.Tensor, item: Any) -> None:
        rounded = cute.make_rmem_tensor(values.layout, self.dtype)
        rounded.store(values.load().to(self.dtype))
        self.staged.write(rounded, first=first // 8, zero=item.seqlen_k >> 31)

    def _show(self) -> None:
        """To TMA, what the warp has written."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
