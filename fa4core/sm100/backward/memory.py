"""The backward's shared memory: what it has besides operands."""

from __future__ import annotations

import cutlass
from cutlass import cute

from fa4core.sm100 import memory


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
