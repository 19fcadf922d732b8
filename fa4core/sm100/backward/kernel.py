"""The backward's main kernel: memory, barriers, and which warp runs which role.

Assembles what the role files need from a `Spec`'s declaration; `launch` compiles and calls it.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from fa4core.backward.mods import GradMods
from fa4core.backward.work import Plan
from fa4core.forward.tma import Operand, copies
from fa4core.forward.views import batched, keys
from fa4core.pipeline.declare import WARP
from fa4core.pipeline.device import LEADER, copy_of, in_role, thread_of
from fa4core.sm100.backward.compute import ComputeWork, compute
from fa4core.sm100.backward.load import LoadWork, load
from fa4core.sm100.backward.memory import Memory
from fa4core.sm100.backward.mma import MmaWork, Operands, mma
from fa4core.sm100.backward.reduce import ReduceWork, reduce
from fa4core.sm100.backward.relay import RelayWork, relay
from fa4core.sm100.backward.spec import PART, TILE, Spec, ds_stage
from fa4core.sm100.begin import Begin, meet_all
from fa4core.sm100.memory import DTYPES
from fa4core.sm100.product import MN_MAJOR, Product, group

Copy = tuple[cute.CopyAtom, cute.Tensor]  # TMA's, and its view of a tensor


def products(spec: Spec) -> dict[str, Product]:
    """S = K Q^T, dP = V dO^T, dV = P dO, dK = dS Q (keys are rows of all), dQ = dS K (queries)."""
    dtype, ctas, keys = DTYPES[spec.dtype], spec.ctas, TILE * spec.ctas
    transposed: dict[str, Any] = {"b_major": MN_MAJOR, "a_in_tensor_memory": True}
    return {
        "s": Product(dtype, (keys, TILE, spec.d), ctas),
        "dp": Product(dtype, (keys, TILE, spec.d_v), ctas),
        "dv": Product(dtype, (keys, spec.d_v, TILE), ctas, **transposed),
        "dk": Product(dtype, (keys, spec.d, TILE), ctas, **transposed),
        "dq": Product(dtype, (TILE, spec.d, keys), ctas, a_major=MN_MAJOR, b_major=MN_MAJOR),
    }


def operands(spec: Spec) -> dict[str, tuple[int, int]]:
    """Rows and columns of the operands that are loaded, by region."""
    d, d_v = spec.d, spec.d_v
    either = {"k": (TILE, d), "q": (spec.rows, d), "v": (TILE, d_v), "do": (spec.rows, d_v)}
    if not spec.pair:
        return either
    columns = {"k": (2 * TILE, d // 2), "q": (TILE, d // 2), "do": (TILE, d_v // 2)}
    return either | {f"{name}_columns": shape for name, shape in columns.items()}


@cute.kernel
def backward_kernel(
    spec: cutlass.Constexpr,
    loads: dict,
    stores: dict,
    sums: tuple,
    lse: cute.Tensor,
    delta: cute.Tensor,
    turns: cute.Tensor,
    items: cute.Tensor,
    runs: cute.Tensor,
    captured: tuple,
    grad_captured: tuple,
    scale: cutlass.Float32,
):
    pipeline = spec.pipeline
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    cta = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if spec.pair else 0

    allocator = pipeline.role("mma").first
    prologue = Memory(spec)
    if thread == 0:
        prologue.barriers.initialise()
    cute.arch.mbarrier_init_fence()
    if warp == allocator:
        cute.arch.alloc_tmem(spec.tmem_columns, prologue.address, spec.pair)
    meet_all(spec.ctas)

    registers = {role.name: role.registers for role in pipeline.roles}
    begin, mods = (
        Begin(spec, Memory, Plan, items, runs, cta),
        GradMods(spec, captured, grad_captured),
    )
    half = copy_of(pipeline, "compute", warp)  # here: in the role it is not found to be uniform
    if in_role(pipeline, "load", warp):
        cute.arch.setmaxregister_decrease(registers["load"])
        load(*begin("load", lambda memory: _loading(memory, loads, lse, delta, cta)))
    if cutlass.const_expr(spec.pair):  # noqa: SIM102 (decided when compiling; the other is not)
        if in_role(pipeline, "relay", warp):
            cute.arch.setmaxregister_decrease(registers["relay"])
            relay(*begin("relay", lambda memory: RelayWork(cta)))
    if in_role(pipeline, "spare", warp):
        cute.arch.setmaxregister_decrease(registers["spare"])
    if in_role(pipeline, "mma", warp):
        cute.arch.setmaxregister_decrease(registers["mma"])
        if cta == LEADER:
            mma(*begin("mma", _issuing))
    if in_role(pipeline, "reduce", warp):
        _set_registers(registers["reduce"])
        row = thread_of(pipeline, "reduce", thread)
        reduce(*begin("reduce", lambda memory: _adding(memory, row, cta, sums, turns)))
    if in_role(pipeline, "compute", warp):
        cute.arch.setmaxregister_increase(registers["compute"])
        row = thread_of(pipeline, "compute", thread)
        given = half, cta, stores, mods, scale
        compute(*begin("compute", lambda memory: _computing(memory, row, *given)), half)

    meet_all(spec.ctas)
    if warp == allocator:
        cute.arch.relinquish_tmem_alloc_permit(spec.pair)
        cute.arch.dealloc_tmem(Memory(spec).tmem, spec.tmem_columns, spec.pair)


def _set_registers(count: int) -> None:
    """From 128, which every thread has at launch."""
    if count < 128:
        cute.arch.setmaxregister_decrease(count)
    else:
        cute.arch.setmaxregister_increase(count)


def _loading(
    memory: Memory, loads: dict[str, Copy], lse: cute.Tensor, delta: cute.Tensor, cta: Any
) -> LoadWork:
    found = {
        name: Operand(*loads[name], memory.panels(name, (rows,), columns, rows))
        for name, (rows, columns) in operands(memory.spec).items()
    }
    return LoadWork(memory.spec, found, lse, delta, memory.numbers, cta)


def _issuing(memory: Memory) -> MmaWork:
    kinds = products(memory.spec)
    s, dp, dv, dk, dq = (kinds[x] for x in ("s", "dp", "dv", "dk", "dq"))
    operands = Operands(
        (s.a(memory, "k"), s.b(memory, "q")),
        (dp.a(memory, "v"), dp.b(memory, "do")),
        dv.b(memory, "do_columns"),
        dk.b(memory, "q_columns"),
        (dq.a(memory, "ds", stages=1), dq.b(memory, "k_columns")),
    )
    tmem = {name: memory.columns(name)(0).toint() for name in memory.spec.tmem}
    instructions = {name: kind.instruction for name, kind in kinds.items()}
    return MmaWork(memory.spec, instructions, operands, tmem)


def _adding(memory: Memory, row: Any, cta: Any, sums: Copy, turns: cute.Tensor) -> ReduceWork:
    columns = memory.spec.added
    staged = memory.panels("added", (WARP,), columns, dtype=cutlass.Float32)
    dq, row_of_it = memory.columns("dq")(0), memory.row("added", row, nbytes=columns * 4)
    return ReduceWork(memory.spec, row, cta, dq, row_of_it, Operand(*sums, staged), turns)


def _computing(
    memory: Memory, row: Any, half: Any, cta: Any, stores: dict[str, Copy], mods: GradMods,
    scale: Any,
) -> ComputeWork:  # fmt: skip
    spec = memory.spec
    tmem = {name: memory.columns(name) for name in spec.tmem}
    staged, ds = (
        memory.panels("ds", (WARP,), PART),
        memory.row("ds", row, ds_stage(spec.pair, cta, half)),
    )
    out = {name: Operand(*stores[name], staged) for name in stores}
    copy = memory.to_peer(row)
    return ComputeWork(spec, row, tmem, ds, out, memory.numbers, mods, scale, copy, cta)


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
    captured: tuple,
    grad_captured: tuple,
    scale: cutlass.Float32,
    ctas: cutlass.Int32,
    stream: cuda.CUstream,
    spec: cutlass.Constexpr,
):
    """q, k, v and gradients: (batch, rows, heads, d), packed tensors without a batch; lse, delta,
    grad_q and turns: padded, see `backward.rows`; items and runs: see `backward.tables`."""
    load = cpasync.CopyBulkTensorTileG2SOp(group(spec.ctas))
    store, add = cpasync.CopyBulkTensorTileS2GOp(), cpasync.CopyReduceBulkTensorTileS2GOp()
    q, k, v, grad_out, grad_k, grad_v = (
        batched(tensor, 4) for tensor in (q, k, v, grad_out, grad_k, grad_v)
    )

    given = {"k": keys(k), "v": keys(v), "q": keys(q), "do": keys(grad_out)}
    loads = {
        name: copies(load, given[name.removesuffix("_columns")], (rows,), columns, rows)
        for name, (rows, columns) in operands(spec).items()
    }
    stores = {
        "dk": copies(store, keys(grad_k), (WARP,), PART, TILE),
        "dv": copies(store, keys(grad_v), (WARP,), PART, TILE),
    }
    of_q = cute.make_tensor(grad_q.iterator, cute.select(grad_q.layout, [1, 2, 0]))
    sums = copies(add, of_q, (WARP,), spec.added, TILE)
    lse, delta, turns = (
        cute.make_tensor(x.iterator, cute.select(x.layout, [1, 0])) for x in (lse, delta, turns)
    )
    backward_kernel(
        spec, loads, stores, sums, lse, delta, turns, items, runs, captured, grad_captured, scale
    ).launch(
        grid=[ctas, 1, 1], block=[spec.pipeline.threads, 1, 1], cluster=[spec.ctas, 1, 1],
        smem=spec.smem_bytes, min_blocks_per_mp=1, stream=stream,
    )  # fmt: skip
