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
from fa4core.sm100.backward.mma import MmaWork, mma
from fa4core.sm100.backward.reduce import ReduceWork, reduce
from fa4core.sm100.backward.relay import RelayWork, relay
from fa4core.sm100.backward.spec import PART, Spec, ds_stage
from fa4core.sm100.backward.tiles import TILE
from fa4core.sm100.begin import Begin, meet_all
from fa4core.sm100.memory import DTYPES
from fa4core.sm100.product import MN_MAJOR, Product, group
from fa4core.sm100.tmem import LANES
from fa4core.sm100.umma import InShared

Copy = tuple[cute.CopyAtom, cute.Tensor]  # TMA's, and its view of a tensor


def products(spec: Spec) -> dict[str, Product]:
    """S = K Q^T, dP = V dO^T, dV = P dO, dK = dS Q (keys are rows of all), and dQ = dS K (queries)
    or, in groups of 128 columns of K, dQ^T = K^T dS^T."""
    dtype, ctas, keys, queries = DTYPES[spec.dtype], spec.ctas, TILE * spec.ctas, spec.queries
    transposed: dict[str, Any] = {"b_major": MN_MAJOR, "a_in_tensor_memory": True}
    of_dq = (LANES, queries, keys) if spec.wide else (queries, spec.d, keys)
    return {
        "s": Product(dtype, (keys, queries, spec.d), ctas),
        "dp": Product(dtype, (keys, queries, spec.d_v), ctas),
        "dv": Product(dtype, (keys, spec.d_v, queries), ctas, **transposed),
        "dk": Product(dtype, (keys, spec.d, queries), ctas, **transposed),
        "dq": Product(dtype, of_dq, ctas, a_major=MN_MAJOR, b_major=MN_MAJOR),
    }


def operands(spec: Spec) -> dict[str, tuple[int, int]]:
    """Rows and columns of the operands that are loaded, by region."""
    d, d_v = spec.d, spec.d_v
    either = {"k": (TILE, d), "q": (spec.rows, d), "do": (spec.rows, d_v)}
    either |= {"v": (TILE, d_v)} if spec.with_k else {}
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
        if cutlass.const_expr(spec.with_k):
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
    spec, kinds = memory.spec, products(memory.spec)
    s, dp, dv, dk, dq = (kinds[x] for x in ("s", "dp", "dv", "dk", "dq"))
    found: dict[str, tuple[InShared, ...]] = {"s": (s.a(memory, "k"), s.b(memory, "q"))}
    if spec.with_v:
        found["dv"] = (dv.b(memory, "do_columns"),)
    if spec.with_k:
        found["dp"] = dp.a(memory, "v"), dp.b(memory, "do")
        found["dk"], found["dq"] = (dk.b(memory, "q_columns"),), _operands_of_dq(memory, dq)
    tmem = {name: memory.columns(name)(0).toint() for name in spec.tmem}
    instructions = {name: kind.instruction for name, kind in kinds.items()}
    return MmaWork(spec, instructions, found, tmem)


def _operands_of_dq(memory: Memory, dq: Product) -> tuple[InShared, InShared]:
    spec, whole = memory.spec, (1, None)
    if not spec.wide:
        return dq.a(memory, "ds", whole), dq.b(memory, "k_columns")
    apart = spec.dq_groups[-1] * TILE * 2  # bytes of the panels between the groups
    return dq.a(memory, "k", (len(spec.dq_groups), apart)), dq.b(memory, "ds", whole)


def _adding(memory: Memory, row: Any, cta: Any, sums: Copy, turns: cute.Tensor) -> ReduceWork:
    columns = memory.spec.added
    staged = memory.panels("added", (WARP,), columns, dtype=cutlass.Float32)
    if memory.spec.wide:
        line: Any = memory.column("added", row // WARP, row % WARP)
    else:
        line = memory.row("added", row, nbytes=columns * 4)
    dq = memory.columns("dq")(0)
    return ReduceWork(memory.spec, row, cta, dq, line, Operand(*sums, staged), turns)


def _computing(
    memory: Memory, row: Any, half: Any, cta: Any, stores: dict[str, Copy], mods: GradMods,
    scale: Any,
) -> ComputeWork:  # fmt: skip
    spec = memory.spec
    tmem = {name: memory.columns(name) for name in spec.tmem}
    place, panels = ds_stage(spec.pair, cta, half), memory.panels("staged", (WARP,), PART)
    out = {name: Operand(*stores[name], panels) for name in stores}
    ds = staged = memory.row("staged", row, place)  # dS lies there, too
    if spec.wide:  # whose halves of the queries share rows of 128 bytes
        ds = memory.row("staged", row, piece=half * 4)
    copy = memory.to_peer(cta, row) if spec.pair else None
    rows = memory.numbers
    return ComputeWork(spec, row, tmem, ds, staged, out, rows, mods, scale, copy, cta)


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
