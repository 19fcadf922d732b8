"""The Hopper backward's main kernel: memory, barriers, and which warp runs which role.

Assembles what the role files need from a `Spec`'s declaration; `launch` compiles and calls it.
"""

from __future__ import annotations

from typing import Any

import attrs
import cuda.bindings.driver as cuda
import cutlass
from cutlass import const_expr, cute
from cutlass.cute.nvgpu import cpasync

from fa4core.backward.mods import GradMods
from fa4core.backward.work import Plan
from fa4core.forward.source import stride
from fa4core.forward.views import batched, keys
from fa4core.forward.work import Share
from fa4core.pipeline.device import Barriers, copy_of, in_role, thread_of
from fa4core.pipeline.endpoint import Ends
from fa4core.sm90.backward import ahead, consumer
from fa4core.sm90.backward.load import LoadWork, load
from fa4core.sm90.backward.products import Operands, Products
from fa4core.sm90.backward.reduce import ReduceWork, reduce
from fa4core.sm90.backward.spec import ROWS, Spec
from fa4core.sm90.backward.tiles import Result, Tiles
from fa4core.sm90.backward.warpgroup import ConsumerWork
from fa4core.sm90.boxes import box
from fa4core.sm90.memory import dtype_of, repeated, staged, swizzled, tensor_in, tma


@attrs.frozen(eq=False)
class Layouts:
    """How tiles lie in their regions of shared memory."""

    k: Any
    v: Any
    q: Any
    out: Any
    weights: Any
    grad_k: Any
    grad_v: Any
    grad_q: Any

    @classmethod
    def of(cls, spec: Spec, columns: dict[str, int] | None = None) -> Layouts:
        """With all columns, or so many of the operands', which come first."""
        columns = columns or {"k": spec.d, "v": spec.d_v, "q": spec.d, "grad_out": spec.d_v}
        dtype, parts, groups = dtype_of(spec), spec.parts, spec.shape.groups
        d, d_v, queries, tiles = spec.d, spec.d_v, spec.queries, spec.tiles
        # what a product takes of a tile's columns begins where an atom of its swizzle does
        keys_, part, part_v = spec.grad_q_columns, d // parts, d_v // parts
        pairs = spec.smem["grad_s"].stride * 8 // dtype.width
        return cls(
            k=repeated(swizzled(dtype, ROWS, columns["k"], keys_), (tiles, ROWS * d)),
            v=repeated(swizzled(dtype, ROWS, columns["v"], d_v), (tiles, ROWS * d_v)),
            q=staged(spec, "q", swizzled(dtype, queries, columns["q"], part), dtype),
            out=staged(
                spec, "grad_out", swizzled(dtype, queries, columns["grad_out"], part_v), dtype
            ),
            weights=repeated(
                swizzled(dtype, ROWS, queries, ROWS), (tiles, ROWS * queries), (2, pairs)
            ),
            grad_k=staged(spec, "grad_k", swizzled(dtype, ROWS, part), dtype),
            grad_v=staged(spec, "grad_v", swizzled(dtype, ROWS, part_v), dtype),
            grad_q=cute.make_layout(
                (ROWS * keys_, groups), stride=(1, spec.smem["grad_q"].stride // 4)
            ),
        )


@cute.kernel
def backward_kernel(
    spec: cutlass.Constexpr,
    loads: dict,
    rows: dict,
    stores: dict,
    grad_q: cute.Tensor,
    turns: cute.Tensor,
    items: cute.Tensor,
    runs: cute.Tensor,
    lists: cute.Tensor,
    captured: tuple,
    grad_captured: tuple,
    scale: cutlass.Float32,
):
    """Of loads and stores: TMA's copy of a tile and its view of the tensor."""
    pipeline, products, layouts = spec.pipeline, Products(spec), Layouts.of(spec)
    dtype = dtype_of(spec)
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = cutlass.memory.SmemAllocator().allocate(spec.smem_bytes, 1024)

    pointer = memory + spec.smem["barriers"].offset
    barriers = Barriers(pipeline, cute.recast_ptr(pointer, dtype=cutlass.Int64))
    s_k = tensor_in(memory, spec, "k", layouts.k, dtype)
    s_v = tensor_in(memory, spec, "v", layouts.v, dtype)
    s_q = tensor_in(memory, spec, "q", layouts.q, dtype)
    s_out = tensor_in(memory, spec, "grad_out", layouts.out, dtype)
    s_grad_s = tensor_in(memory, spec, "grad_s", layouts.weights, dtype)
    s_p = tensor_in(memory, spec, "p", layouts.weights, dtype) if spec.parts > 1 else None
    pointer = memory + spec.smem["grad_q"].offset
    s_grad_q = cute.make_tensor(cute.recast_ptr(pointer, dtype=cutlass.Float32), layouts.grad_q)
    s_rows = {name: _rows_in(memory, spec, name) for name in rows}

    if const_expr(spec.pads):
        _clear(memory, spec, thread)
        cute.arch.sync_threads()
    if thread == 0:
        barriers.initialise()
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    registers = {role.name: role.registers for role in pipeline.roles}

    t = copy_of(pipeline, "consumer", warp)
    if in_role(pipeline, "load", warp):
        cute.arch.setmaxregister_decrease(registers["load"])
        inner = Layouts.of(spec, spec.loaded)
        shared = {
            "k": tensor_in(memory, spec, "k", inner.k, dtype),
            "v": tensor_in(memory, spec, "v", inner.v, dtype),
            "q": tensor_in(memory, spec, "q", inner.q, dtype),
            "grad_out": tensor_in(memory, spec, "grad_out", inner.out, dtype),
        }
        tiles_in = {name: (*loads[name], shared[name]) for name in loads}
        bulk = cute.make_copy_atom(
            cpasync.CopyBulkG2SOp(), cutlass.Float32, num_bits_per_copy=32 * spec.queries
        )
        of_rows = {name: (bulk, rows[name], s_rows[name]) for name in rows}
        plan = _plan(spec, items, runs, lists)
        load(LoadWork(spec, tiles_in, of_rows), plan, Ends(pipeline, "load", barriers))
    if const_expr(spec.staged):  # noqa: SIM102
        if in_role(pipeline, "reduce", warp):
            cute.arch.setmaxregister_decrease(registers["reduce"])
            work = ReduceWork(spec, grad_q, s_grad_q, turns)
            plan = _plan(spec, items, runs, lists)
            reduce(work, plan, Ends(pipeline, "reduce", barriers))
    if in_role(pipeline, "spare", warp):
        cute.arch.setmaxregister_decrease(registers["spare"])
    if in_role(pipeline, "consumer", warp):
        cute.arch.setmaxregister_increase(registers["consumer"])
        member = thread_of(pipeline, "consumer", thread)
        mods = GradMods(spec, captured, grad_captured)
        results = {
            name: Result(
                spec, name, tensor_in(memory, spec, f"grad_{name}", layout, dtype), *stores[name]
            )
            for name, layout in (("k", layouts.grad_k), ("v", layouts.grad_v))
        }
        operands = Operands(spec, products, t, s_k, s_v, s_q, s_out, s_grad_s, s_p)
        tiles = Tiles(spec, member, s_rows, s_p, s_grad_s, s_grad_q, grad_q, results)
        consumer_work = ConsumerWork(spec, products, operands, tiles, t, member, mods, scale)
        plan = _plan(spec, items, runs, lists)
        role = ahead.consumer if spec.held else consumer.consumer
        role(consumer_work, plan, Ends(pipeline, "consumer", barriers), t)


@cute.jit
def _clear(memory: cute.Pointer, spec: cutlass.Constexpr, thread: cutlass.Int32):
    """All of shared memory zero, also for TMA and wgmma."""
    words = cute.make_tensor(
        cute.recast_ptr(memory, dtype=cutlass.Int32), cute.make_layout(spec.smem_bytes // 4)
    )
    for i in cutlass.range(thread, spec.smem_bytes // 4, spec.pipeline.threads, unroll=1):
        words[i] = cutlass.Int32(0)
    cute.arch.fence_proxy("async.shared", space="cta")


def _plan(spec: Spec, items: cute.Tensor, runs: cute.Tensor, lists: cute.Tensor) -> Plan:
    """The CTA's; each role reads its own, because one for all would be spilled."""
    cta, _, _ = cute.arch.block_idx()
    uniform = cute.arch.make_warp_uniform
    begin, end = (uniform(lists[cta + i]) for i in range(2))
    return Plan(items, runs, end, stride(begin, 1), Share(spec.tiles), uniform)


def _rows_in(memory: cute.Pointer, spec: Spec, name: str) -> cute.Tensor:
    """(queries, stages) of LSE or delta."""
    placed = spec.smem[name]
    stride = (1, placed.stride // 4)
    layout = cute.make_layout((spec.queries, placed.region.stages), stride=stride)
    pointer = cute.recast_ptr(memory + placed.offset, dtype=cutlass.Float32)
    return cute.make_tensor(pointer, layout)


@cute.jit
def backward(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    grad_out: cute.Tensor,
    grad_k: cute.Tensor,
    grad_v: cute.Tensor,
    lse: cute.Tensor,
    delta: cute.Tensor,
    grad_q: cute.Tensor,
    turns: cute.Tensor,
    items: cute.Tensor,
    runs: cute.Tensor,
    lists: cute.Tensor,
    captured: tuple,
    grad_captured: tuple,
    scale: cutlass.Float32,
    ctas: cutlass.Int32,
    stream: cuda.CUstream,
    spec: cutlass.Constexpr,
):
    """q, k, v and gradients: (batch, rows, heads, d), packed tensors without a batch; lse, delta,
    grad_q and turns: padded, see `backward.rows`; items and runs: see `backward.tables`; lists: see
    `forward.lists`."""
    columns, queries = spec.loaded, spec.queries
    layouts = Layouts.of(spec, columns)
    q, k, v, grad_out = (batched(tensor, 4) for tensor in (q, k, v, grad_out))
    grad_k, grad_v = (batched(tensor, 4) for tensor in (grad_k, grad_v))
    inward, outward = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    loads = {
        "k": tma(inward, keys(k), layouts.k, (ROWS, columns["k"])),
        "v": tma(inward, keys(v), layouts.v, (ROWS, columns["v"])),
        "q": tma(inward, keys(q), layouts.q, (queries, columns["q"])),
        "grad_out": tma(inward, keys(grad_out), layouts.out, (queries, columns["grad_out"])),
    }
    boxes = {name: box(part) for name, (_, part) in spec.stored.items()}
    stores = {
        name: tma(
            outward, keys(tensor), swizzled(dtype_of(spec), ROWS, boxes[name]), (ROWS, boxes[name])
        )
        for name, tensor in (("k", grad_k), ("v", grad_v))
    }
    backward_kernel(
        spec, loads, {"lse": lse, "delta": delta}, stores, grad_q, turns, items, runs, lists,
        captured, grad_captured, scale,
    ).launch(
        grid=[ctas, 1, 1], block=[spec.pipeline.threads, 1, 1], min_blocks_per_mp=1, stream=stream
    )  # fmt: skip
