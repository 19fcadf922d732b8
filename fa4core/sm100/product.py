"""`Product`: one of a kernel's matrix products, and how its operands lie in shared memory."""

from __future__ import annotations

from typing import Any

import attrs
import cutlass
import cutlass.utils.blackwell_helpers as sm100
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

from fa4core.sm100.umma import InShared, Instruction

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN

Ring = tuple[int, int | None]  # stages, and bytes from one to the next; None: each behind another


def group(ctas: int) -> tcgen05.CtaGroup:
    return tcgen05.CtaGroup.ONE if ctas == 1 else tcgen05.CtaGroup.TWO


@attrs.frozen(eq=False)
class Product:
    """One kind of product D = A B; B is in shared memory.

    Attributes:
        dtype: Of A and B.
        tile: M, N and K over all CTAs.
        ctas: How many share it, 1 or 2.
        a_major, b_major: Of the operands.
        a_in_tensor_memory: Else A is in shared memory, too.
    """

    dtype: type[cutlass.Numeric]
    tile: tuple[int, int, int]
    ctas: int = 1
    a_major: OperandMajorMode = K_MAJOR
    b_major: OperandMajorMode = K_MAJOR
    a_in_tensor_memory: bool = False

    @property
    def instruction(self) -> Instruction:
        m, n, _ = self.tile
        return Instruction(m, n, self.dtype, self.a_major, self.b_major, self.ctas)

    def tiled(self) -> cute.TiledMma:
        """Made anew: nothing that one role makes may be used in another."""
        source = tcgen05.OperandSource
        return sm100.make_trivial_tiled_mma(
            self.dtype, self.dtype, self.a_major, self.b_major, cutlass.Float32, group(self.ctas),
            self.tile[:2], source.TMEM if self.a_in_tensor_memory else source.SMEM,
        )  # fmt: skip

    def layout_a(self, stages: int, stride: int | None = None) -> cute.ComposedLayout:
        """Of A's tiles in shared memory, `stride` bytes apart or one behind the other."""
        layout = sm100.make_smem_layout_a(self.tiled(), self.tile, self.dtype, stages)
        return self._apart(layout, stages, stride)

    def layout_b(self, stages: int, stride: int | None = None) -> cute.ComposedLayout:
        layout = sm100.make_smem_layout_b(self.tiled(), self.tile, self.dtype, stages)
        return self._apart(layout, stages, stride)

    def a(self, memory: Any, name: str, ring: Ring | None = None) -> InShared:
        """A out of a region of shared memory: by its stage, or by that of another ring there."""
        tensor = memory.operand(name, self.layout_a(*(ring or _ring(memory, name))))
        return InShared(self.tiled().make_fragment_A(tensor))

    def b(self, memory: Any, name: str, ring: Ring | None = None) -> InShared:
        tensor = memory.operand(name, self.layout_b(*(ring or _ring(memory, name))))
        return InShared(self.tiled().make_fragment_B(tensor))

    def _apart(self, layout: Any, stages: int, stride: int | None) -> cute.ComposedLayout:
        if stride is None:
            return layout
        ring = cute.make_layout(stages, stride=stride * 8 // self.dtype.width)
        one = cute.select(layout, mode=[0, 1, 2])
        return cute.make_composed_layout(one.inner, 0, cute.append(one.outer, ring))


def _ring(memory: Any, name: str) -> Ring:
    placed = memory.spec.smem[name]
    return placed.region.stages, placed.stride
