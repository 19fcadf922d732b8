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

    def row(self, name: str, thread: Any, stage: Any = 0, nbytes: int = 128, piece: Any = 0) -> Row:
        """Row `thread` of a region whose stages are panels of 128 or 64 bytes, from `stage` on.

        Args:
            piece: Of 16 bytes, where it begins: the first of a half or of the whole.
        """
        stride = self.spec.smem[name].stride
        begin = self.at(name, cutlass.Uint8).toint() + stage * stride
        return Row(begin, stride, thread, nbytes, piece)

    def column(self, name: str, warp: Any, lane: Any) -> Column:
        """Column `lane` of the 32 rows that a warp has in a region of panels of 128 bytes."""
        stride = self.spec.smem[name].stride
        return Column(self.at(name, cutlass.Uint8).toint() + warp * (32 * 128), stride, lane)


class Row(Fixed):
    """A row of a panel of 128 or 64 bytes, which a thread writes 16 bytes at a time.

    One address serves all pieces: which of them lies where is an exclusive or with the row's
    number (the swizzle), and the address has these bits of both.

    Attributes:
        address: In shared memory, of stage 0.
        stride: Bytes from stage to stage.
    """

    def __init__(self, begin: Any, stride: int, row: Any, nbytes: int, piece: Any = 0):
        swizzle = row * nbytes // 128 % (nbytes // 16)
        self.address, self.stride = begin + row * nbytes + (swizzle ^ piece) * 16, stride

    def write(self, values: cute.Tensor, stage: Any = 0, first: int = 0, zero: Any = 0) -> None:
        """Values of the thread's registers, from piece `first` on.

        Args:
            zero: 0 that the compiler does not know; then it computes the pieces' addresses here and
                keeps none of them in registers.
        """
        size, row = 128 // values.element_type.width, self.address + zero
        for i in range(cute.size(values) // size):
            of = cute.make_tensor(values.iterator + i * size, cute.make_layout(size))
            at = (row ^ ((first + i) * 16)) + stage * self.stride
            to = cute.make_ptr(values.element_type, at, cute.AddressSpace.smem, assumed_align=16)
            cute.autovec_copy(of, cute.make_tensor(to, cute.make_layout(size)))


class Column(Fixed):
    """A column of float32 in rows of 128 bytes, which a thread writes row by row: a warp's threads
    fill a row at a time.

    Attributes:
        address: In shared memory, of stage 0 and the first row.
        stride: Bytes from stage to stage.
    """

    def __init__(self, begin: Any, stride: int, column: Any):
        self.address, self.stride = begin + column * 4, stride

    def write(self, values: cute.Tensor, stage: Any = 0) -> None:
        """Values of the thread's registers, one a row."""
        for i in range(cute.size(values)):
            at = (self.address ^ (i % 8 * 16)) + stage * self.stride + i * 128
            to = cute.make_ptr(values.element_type, at, cute.AddressSpace.smem, assumed_align=4)
            cute.make_tensor(to, cute.make_layout(1))[0] = values[i]
