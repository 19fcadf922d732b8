"""Shared memory of the Hopper kernels: operands in their regions, and how TMA moves them.

Where regions lie is the pipeline's declaration; how rows behind a sequence are left out is said in
`fa4core.forward.views`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import cute
from cutlass._mlir.dialects import llvm
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.utils import LayoutEnum

from fa4core.lowering.cute import inside
from fa4core.spec import KernelSpec


def dtype_of(spec: KernelSpec) -> Any:
    """The type of the inputs."""
    return {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[spec.dtype]


def swizzled(dtype: Any, rows: int, columns: int, piece: int = 0) -> cute.ComposedLayout:
    """A tile, row-major, with the widest swizzle whose atoms fit into `piece` columns, of which
    products take some (0: into all)."""
    kind = sm90.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, piece or columns)
    atom = warpgroup.make_smem_layout_atom(kind, dtype)
    return cute.tile_to_shape(atom, (rows, columns), order=(0, 1))


def repeated(layout: cute.ComposedLayout, *modes: tuple[int, int]) -> cute.ComposedLayout:
    """The layout of a tile with further modes, (extent, stride) each."""
    outer = cute.select(layout, mode=[0, 1]).outer
    for extent, stride in modes:
        outer = cute.append(outer, cute.make_layout(extent, stride=stride))
    return cute.make_composed_layout(layout.inner, 0, outer)


def staged(
    spec: KernelSpec, region: str, layout: cute.ComposedLayout, dtype: Any
) -> cute.ComposedLayout:
    """The layout of a tile, once for each stage of a region."""
    placed = spec.smem[region]
    return repeated(layout, (placed.region.stages, placed.stride * 8 // dtype.width))


def tensor_in(
    memory: cute.Pointer, spec: KernelSpec, region: str, layout: cute.ComposedLayout, dtype: Any
) -> cute.Tensor:
    """A region as a tensor; `memory` is where all of them begin."""
    pointer = cute.recast_ptr(memory + spec.smem[region].offset, layout.inner, dtype=dtype)
    return cute.make_tensor(pointer, layout.outer)


def tma(
    op: Any, view: cute.Tensor, layout: cute.ComposedLayout, shape: tuple
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """TMA's copy of one tile and its view of a tensor."""
    atom, there = cpasync.make_tiled_tma_atom(op, view, cute.select(layout, mode=[0, 1]), shape)
    return atom, there


def transposed(tensor: cute.Tensor) -> cute.Tensor:
    """With its first two modes exchanged."""
    rest = list(range(2, cute.rank(tensor)))
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=[1, 0, *rest]))


def partition(
    atom: Any, shared: Any, tensor: Any, shape: tuple, axis: int,
    row: Any, length: Any, start: Any, h: Any, b: Any, column: Any = 0,
) -> tuple[Any, Any]:  # fmt: skip
    """A tile in shared memory, by stage, and its place in global memory, as TMA copies them.

    Args:
        atom, tensor: See `tma`; the tensor is a view by `fa4core.forward.views.keys`.
        shared: (*shape, stages).
        shape: Of the tile.
        axis: Which mode rows are.
        row, column: Where the tile begins within the sequence.
        length, start: Of the sequence.
        h, b: Head and batch entry.
    """
    h, b = inside(h, tensor.shape[2]), inside(b, tensor.shape[3])
    there = tensor[(None, None, h, b, start + length)]
    shift = [cutlass.Int32(column), cutlass.Int32(column)]
    shift[axis] = tensor.shape[axis] - length + row
    return boxed(atom, shared, cute.domain_offset(tuple(shift), there), shape)


def boxed(atom: Any, shared: Any, there: Any, shape: tuple) -> tuple[Any, Any]:
    """A tile in shared memory, by stage, and the one at the origin of `there`."""
    tile = cute.local_tile(there, shape, (0, 0))
    return cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(shared, 0, 2),
        cute.group_modes(tile, 0, 2),
    )


def put(
    accumulator: cute.Tensor, product: cute.TiledMma, thread: Any, shared: cute.Tensor
) -> cute.Tensor:
    """A warpgroup's accumulator, rounded, into a tile of 16-bit numbers; for TMA and wgmma to read
    behind a barrier. Returns the thread's numbers."""
    rounded = cute.make_rmem_tensor(accumulator.layout, shared.element_type)
    rounded.store(accumulator.load().to(shared.element_type))
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), shared.element_type)
    tiled = cute.make_tiled_copy_C(atom, product)
    place = tiled.get_slice(thread).partition_D(shared)
    cute.copy(atom, tiled.retile(rounded), place)
    cute.arch.fence_proxy("async.shared", space="cta")
    return rounded


def put_as_held(accumulator: cute.Tensor, thread: Any, shared: cute.Tensor) -> None:
    """A warpgroup's accumulator as its threads hold it: 4 numbers of each, then the next 4. So no
    two threads meet in a bank, and one bulk copy takes all of it, behind a fence."""
    held, place = _as_held(accumulator, thread, shared.iterator)
    cute.autovec_copy(held, place)


def add_as_held(accumulator: cute.Tensor, thread: Any, to: cute.Pointer) -> None:
    """The same, added to what is in global memory."""
    held, place = _as_held(accumulator, thread, to)
    for step in range(cute.size(held, mode=[1])):
        at = place[(None, step)].iterator
        add_four(at, *(held[i, step] for i in range(4)))


def _as_held(
    accumulator: cute.Tensor, thread: Any, to: cute.Pointer
) -> tuple[cute.Tensor, cute.Tensor]:
    """(4, steps) of a thread, and their place."""
    steps = cute.size(accumulator) // 4
    place = cute.make_tensor(to, cute.make_layout((4, 128, steps), stride=(1, 4, 4 * 128)))
    held = cute.make_tensor(accumulator.iterator, cute.make_layout((4, steps)))
    return held, place[(None, thread, None)]


@dsl_user_op
def add_four(
    to: cute.Pointer, a: Any, b: Any, c: Any, d: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """Add four float32 to neighbours in global memory, each addition atomic."""
    values = [cutlass.Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b, c, d)]
    arguments = [to.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip), *values]
    text = "red.relaxed.gpu.global.add.v4.f32 [$0], {$1, $2, $3, $4};"
    llvm.inline_asm(None, arguments, text, "l,f,f,f,f", has_side_effects=True, loc=loc, ip=ip)


@dsl_user_op
def add_bulk(of: cute.Tensor, to: cute.Pointer, *, loc: Any = None, ip: Any = None) -> None:
    """Begin to add float32 in shared memory, contiguous, to global memory; by one thread."""
    nbytes = cutlass.Int32(cute.cosize(of.layout) * 4)
    arguments = [
        to.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        of.iterator.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        nbytes.ir_value(loc=loc, ip=ip),
    ]
    text = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;"
    llvm.inline_asm(None, arguments, text, "l,r,r", has_side_effects=True, loc=loc, ip=ip)


@cute.jit
def store(atom: Any, of: Any, to: Any, thread: Any, wanted: Any):
    """Begin to copy a tile to global memory, by the first warp of a group."""
    if (thread < 32) & wanted:
        cute.copy(atom, of, to)
        cute.arch.cp_async_bulk_commit_group()


@cute.jit
def stored(thread: Any):
    """Until tiles stored before have been read from shared memory, in the warp that stored them."""
    if thread < 32:
        cute.arch.cp_async_bulk_wait_group(0, read=True)
