"""What specs of Blackwell kernels have in common: tensor memory. Imports no DSL."""

from __future__ import annotations

from functools import cached_property

from fa4core.pipeline.declare import Pipeline
from fa4core.pipeline.layout import Placed, place


class InTensorMemory:
    """For specs that declare a pipeline with regions of tensor memory."""

    @cached_property
    def pipeline(self) -> Pipeline:
        """Roles, signals and memory."""
        raise NotImplementedError

    @cached_property
    def tmem(self) -> dict[str, Placed]:
        """Where regions of tensor memory lie."""
        return place(self.pipeline.tmem, self.pipeline.limits.tmem_columns, "columns")

    @property
    def tmem_columns(self) -> int:
        """To allocate: a power of two, at least 32."""
        used = max(p.end for p in self.tmem.values())
        return max(32, 1 << (used - 1).bit_length())
