"""The backward's shared memory: what it has besides operands."""

from __future__ import annotations

import cutlass
from cutlass import cute

from fa4core.sm100 import memory
from fa4core.sm100.backward.spec import TILE


class Memory(memory.Memory):
    """A CTA's shared memory, from where it begins."""

    @property
    def numbers(self) -> cute.Tensor:
        """LSE and delta of a block's queries: (128, {LSE, delta}, stage)."""
        placed = self.spec.smem["rows"]
        layout = cute.make_layout(
            (TILE, 2, placed.region.stages), stride=(1, TILE, placed.stride // 4)
        )
        return cute.make_tensor(self.at("rows", cutlass.Float32), layout)
