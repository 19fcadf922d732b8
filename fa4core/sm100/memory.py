"""Shared memory on the device: a spec's regions as tensors, in the shapes that roles want.

A kernel makes one `Memory` for the prologue and one in each role, so that a role's addresses are
computed where it begins. An address that all roles shared would be live through all of them, and
the compiler would keep it on the stack and load it for every barrier.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute

from fa4core.forward.panels import boxes
from fa4core.pipeline.device import Barriers
from fa4core.pipeline.effects import Fixed
from fa4core.sm100.tmem import LANES

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


class Memory(Fixed):
    """A CTA's shared memory, from where it begins."""

    def __init__(self, spec: Any):
        self.spec = spec
        self.begin = cute.arch.get_dyn_smem(cutlass.Uint8, 1024)

    @property
    def dtype(self) -> Any:
        """Of operands."""
        return DTYPES[self.spec.dtype]

    def at(self, name: str, dtype: Any, offset: int = 0) -> cute.Pointer:
        """Where a region begins, and `offset` bytes further."""
        return cute.recast_ptr(self.begin + self.spec.smem[name].offset + offset, dtype=dtype)

    @property
    def barriers(self) -> Barriers:
        return Barriers(self.spec.pipeline, self.at("barriers", cutlass.Int64))

    @property
    def address(self) -> cute.Pointer:
        """Where the address of the allocated tensor memory is."""
        return self.at("address", cutlass.Int32)

    @property
    def tmem(self) -> cute.Pointer:
        """The tensor memory that was allocated."""
        return cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, self.address)

    def columns(self, name: str) -> Any:
        """Where each stage of a region of tensor memory is."""
        tmem = self.tmem
        return lambda stage: tmem + self.spec.tmem[name].at(stage)

    def operand(self, name: str, layout: cute.ComposedLayout) -> cute.Tensor:
        """A region's tiles as the tensor core reads them."""
        where = self.begin + self.spec.smem[name].offset
        pointer = cute.recast_ptr(where, layout.inner, dtype=self.dtype)
        return cute.make_tensor(pointer, layout.outer)

    def panels(
        self,
        name: str,
        rows: tuple[int, ...],
        columns: int,
        height: int = LANES,
        dtype: Any = None,
    ) -> cute.Tensor:
        """A region's tiles as TMA fills them; the last modes are the copy and the stage."""
        placed = self.spec.smem[name]
        return boxes(self.begin, placed, rows, columns, height, dtype or self.dtype)

    def rows(self, name: str, columns: int, dtype: Any) -> cute.Tensor:
        """A region's stages as (row, column, stage): rows of one panel of 128 bytes."""
        region, swizzle = self.spec.smem[name], cute.make_swizzle(3, 4, 3)
        pointer = cute.recast_ptr(self.begin + region.offset, swizzle, dtype=dtype)
        shape = LANES, columns, region.region.stages
        stride = columns, 1, region.stride * 8 // dtype.width
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=stride))
