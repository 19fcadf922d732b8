"""The forward's shared memory: what it has besides operands."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute

from fa4core.sm100 import memory
from fa4core.sm100.forward.spec import TILE, Spec


def out_type(spec: Spec) -> Any:
    return cutlass.Float32 if spec.split else memory.DTYPES[spec.dtype]


class Memory(memory.Memory):
    """A CTA's shared memory, from where it begins."""

    @property
    def stats(self) -> cute.Tensor:
        """(2, row, tile): see `correction`."""
        layout = cute.make_layout((2, TILE, self.spec.tiles), stride=(TILE, 1, 2 * TILE))
        return cute.make_tensor(self.at("stats", cutlass.Float32), layout)
