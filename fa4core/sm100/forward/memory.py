"""Shared memory on the device: a spec's regions as tensors, in the shapes that roles want.

`kernel` makes one `Memory` for the prologue and one in each role, so that a role's addresses are
computed where it begins. An address that all roles shared would be live through all of them, and
the compiler would keep it on the stack and load it for every barrier.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import cute

from fa4core.pipeline.device import Barriers
from fa4core.pipeline.effects import Fixed
from fa4core.sm100.forward import views
from fa4core.sm100.forward.spec import TILE, Spec

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}


def out_type(spec: Spec) -> Any:
    return cutlass.Float32 if spec.split else DTYPES[spec.dtype]


class Memory(Fixed):
    """A CTA's shared memory, from where it begins."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.begin = cute.arch.get_dyn_smem(cutlass.Uint8, 1024)

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

    @property
    def stats(self) -> cute.Tensor:
        """(2, row, tile): see `correction`."""
        layout = cute.make_layout((2, TILE, self.spec.tiles), stride=(TILE, 1, 2 * TILE))
        return cute.make_tensor(self.at("stats", cutlass.Float32), layout)

    def operand(self, name: str, layout: cute.ComposedLayout) -> cute.Tensor:
        """A region's tiles as the tensor core reads them."""
        where = self.begin + self.spec.smem[name].offset
        dtype = DTYPES[self.spec.dtype]
        pointer = cute.recast_ptr(where, layout.inner, dtype=dtype)
        return cute.make_tensor(pointer, layout.outer)

    def panels(
        self, name: str, rows: tuple[int, ...], columns: int, height: int = TILE
    ) -> cute.Tensor:
        """A region's tiles as TMA fills them; the last modes are the copy and the stage."""
        spec = self.spec
        region, layout = spec.smem[name], views.box(rows, columns, height)
        dtype = out_type(spec) if name == "out" else DTYPES[spec.dtype]
        count = math.prod(rows)
        copies = cute.make_layout(height // count, stride=count * views.panel(columns))
        layout = cute.append(layout, copies)
        stages = cute.make_layout(region.region.stages, stride=region.stride * 8 // dtype.width)
        swizzle = views.swizzle(columns, dtype)
        pointer = cute.recast_ptr(self.begin + region.offset, swizzle, dtype=dtype)
        return cute.make_tensor(pointer, cute.append(layout, stages))

    @property
    def staged(self) -> cute.Tensor:
        """Staged parts of O as (row, column, stage)."""
        region, columns = self.spec.smem["out"], self.spec.out_columns
        swizzle = cute.make_swizzle(3, 4, 3)
        pointer = cute.recast_ptr(self.begin + region.offset, swizzle, dtype=out_type(self.spec))
        shape = TILE, columns, region.region.stages
        layout = cute.make_layout(shape, stride=(columns, 1, TILE * columns))
        return cute.make_tensor(pointer, layout)
