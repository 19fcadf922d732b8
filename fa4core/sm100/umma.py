"""Issues tcgen05.mma from descriptors that were made once.

CuTe makes the descriptor of a whole operand; that of a k-step of a stage lies a fixed number of
16-byte units behind it. A product is one block of PTX: one elected thread, immediate offsets. MMA
roles use it; it knows nothing of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05

K_COLUMNS = 8  # of tensor memory, that one instruction reduces over: 16 elements of 16 bit


@attrs.frozen
class Instruction:
    """One kind of tcgen05.mma on 16-bit operands with a float32 accumulator.

    Attributes:
        m, n: Shape, over all CTAs of the group.
        dtype: Of A and B.
        a_major, b_major: Of the operands.
        ctas: How many share the instruction, 1 or 2.
    """

    m: int
    n: int
    dtype: type[cutlass.Numeric]
    a_major: OperandMajorMode
    b_major: OperandMajorMode
    ctas: int = 1

    @property
    def descriptor(self) -> int:
        """The instruction descriptor (PTX ISA, tcgen05, instruction descriptor of .kind::f16)."""
        kind = 1 if self.dtype is cutlass.BFloat16 else 0
        transposed_a, transposed_b = (
            1 if major == OperandMajorMode.MN else 0 for major in (self.a_major, self.b_major)
        )
        shape = self.n // 8 << 17 | self.m // 16 << 24
        return 1 << 4 | kind << 7 | kind << 10 | transposed_a << 15 | transposed_b << 16 | shape


@attrs.frozen
class Place:
    """An operand of one product: where it begins, and the offset of each k-step.

    Attributes:
        low: Address in tensor memory, or the low half of a shared-memory descriptor.
        high: The other half; None in tensor memory.
        offsets: Of the k-steps, in columns or units of 16 bytes.
        moves: Whether `low` depends on a stage of a ring.
    """

    low: Any
    high: Any
    offsets: Sequence[int]
    moves: bool = False

    def steps(self, first: int, end: int) -> Place:
        """Some of the k-steps."""
        return attrs.evolve(self, offsets=self.offsets[first:end])


class InShared:
    """Operands in shared memory: the descriptor of stage 0 and where the others are.

    Args:
        fragment: What `make_fragment_A` or `make_fragment_B` gives: (MMA, M or N, K, stage).
    """

    def __init__(self, fragment: cute.Tensor):
        whole = tcgen05.smem_descriptor_to_int(fragment.iterator)
        self.low, self.high = cutlass.Int32(whole), cutlass.Int32(whole >> 32)
        self.layout, self.moves = fragment.layout, cute.size(fragment, mode=[3]) > 1
        self.offsets = [self.layout((0, 0, i, 0)) for i in range(cute.size(fragment, mode=[2]))]

    def at(self, stage: Any) -> Place:
        if not self.moves:
            return Place(self.low, self.high, self.offsets)
        low = self.low + stage * self.layout((0, 0, 0, 1))
        return Place(low, self.high, self.offsets, moves=True)


def in_tensor(address: Any, steps: int) -> Place:
    """An operand in tensor memory, 16 bit packed two a column."""
    return Place(address, None, [i * K_COLUMNS for i in range(steps)])


def issue(instruction: Instruction, accumulator: Any, a: Place, b: Place, accumulate: Any) -> None:
    """accumulator (+)= A B over the k-steps of both operands.

    Args:
        instruction: The kind.
        accumulator: Address in tensor memory.
        a, b: The operands; B is in shared memory.
        accumulate: Whether the first step adds to what is there.
    """
    given: list[Any] = []

    def name(value: Any) -> str:
        """Of an argument of the PTX. There must be none without use: it would shift the others."""
        given.append(value)
        return f"{{$r{len(given) - 1}}}"

    d, low_a, low_b, high_b = (name(x) for x in (accumulator, a.low, b.low, b.high))
    high_a = None if a.high is None else name(a.high)
    mma = f"@leader tcgen05.mma.cta_group::{instruction.ctas}.kind::f16 [{d}]"
    # The compiler can't know what is 0 here, and hoists no k-step's address out of a loop, where
    # all of them would fill the registers: bit 31 of a descriptor that depends on the round of the
    # loop, or what is above a lane's five bits.
    zero = [f"shr.u32 zero, {low_b}, 31;"] if b.moves else ["shr.u32 zero, lane, 5;"]
    code = [
        "{", ".reg .pred leader, adds;", ".reg .b32 lane, zero, from_a, from_b, at_a, at_b;",
        ".reg .b64 a, b;",
        f"elect.sync {'_' if b.moves else 'lane'}|leader, -1;",
        *zero,
        f"add.s32 from_a, zero, {low_a};",
        f"mov.b32 from_b, {low_b};" if b.moves else f"add.s32 from_b, zero, {low_b};",
        f"setp.ne.b32 adds, {name(cutlass.Int32(accumulate))}, 0;",
    ]  # fmt: skip
    for step, (of_a, of_b) in enumerate(zip(a.offsets, b.offsets, strict=True)):
        code += [f"add.s32 at_a, from_a, {of_a};", f"add.s32 at_b, from_b, {of_b};"]
        if high_a is not None:
            code += [f"mov.b64 a, {{at_a, {high_a}}};"]
        code += [
            f"mov.b64 b, {{at_b, {high_b}}};",
            f"{mma}, {'[at_a]' if high_a is None else 'a'}, b, {instruction.descriptor}, "
            f"{'1' if step else 'adds'};",
        ]
    cute.arch.inline_ptx("\n".join([*code, "}"]), read_only_args=given)
