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
from fa4core.pipeline.device import copy_of, in_role, thread_of
from fa4core.sm100.backward.compute import ComputeWork, compute
from fa4core.sm100.backward.load import LoadWork, load
from fa4core.sm100.backward.memory import Memory
from fa4core.sm100.backward.mma import MmaWork, Operands, mma
from fa4core.sm100.backward.reduce import ReduceWork, reduce
from fa4core.sm100.backward.spec import PART, TILE, Spec
from fa4core.sm100.backward.tuning import ADDED
from fa4core.sm100.begin import Begin, meet_all
from fa4core.sm100.memory import DTYPES
from fa4core.sm100.product import MN_MAJOR, Product, group
from fa4core.sm100.tmem import LANES
from fa4core.sm100.umma import InShared

Copy = tuple[cute.CopyAtom, cute.Tensor]  # TMA's, and its view of a tensor


def products(spec: Spec) -> dict[str, Product]:
    """S = K Q^T, dP = V dO^T, dV = P dO, dK = dS Q (keys are rows of all), and dQ = dS K (queries)
    or, in groups of 128 columns of K, dQ^T = K^T dS^T."""
    dtype, queries = DTYPES[spec.dtype], spec.queries
    transposed: dict[str, Any] = {"b_major": MN_MAJOR, "a_in_tensor_memory": True}
    of_dq = (LANES, queries, TILE) if spec.wide else (queries, spec.d, TILE)
    return {
        "s": Product(dtype, (TILE, queries, spec.d)),
        "dp": Product(dtype, (TILE, queries, spec.d_v)),
        "dv": Product(dtype, (TILE, spec.d_v, queries), **transposed),
        "dk": Product(dtype, (TILE, spec.d, queries), **transposed),
        "dq": Product(dtype, of_dq, a_major=MN_MAJOR, b_major=MN_MAJOR),
    }


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

    allocator = pipeline.role("mma").first
    prologue = Memory(spec)
    if thread == 0:
        prologue.barriers.initialise()
    cute.arch.mbarrier_init_fence()
    if warp == allocator:
        cute.arch.alloc_tmem(spec.tmem_columns, prologue.address)
    meet_all(spec.ctas)

    registers = {role.name: role.registers for role in pipeline.roles}
    begin, mods = Begin(spec, Memory, Plan, items, runs, 0), GradMods(spec, captured, grad_captured)
    half = copy_of(pipeline, "compute", warp)  # here: in the role it is not found to be uniform
    if in_role(pipeline, "load", warp):
        cute.arch.setmaxregister_decrease(registers["load"])
        load(*begin("load", lambda memory: _loading(memory, loads, lse, delta)))
    if in_role(pipeline, "spare", warp):
        cute.arch.setmaxregister_decrease(registers["spare"])
    if in_role(pipeline, "mma", warp):
        cute.arch.setmaxregister_decrease(registers["mma"])
        mma(*begin("mma", _issuing))
    if in_role(pipeline, "reduce", warp):
        _set_registers(registers["reduce"])
        if cutlass.const_expr(spec.with_k):
            row = thread_of(pipeline, "reduce", thread)
            reduce(*begin("reduce", lambda memory: _adding(memory, row, sums, turns)))
    if in_role(pipeline, "compute", warp):
        cute.arch.setmaxregister_increase(registers["compute"])
        row = thread_of(pipeline, "compute", thread)
        given = half, stores, mods, scale
        compute(*begin("compute", lambda memory: _computing(memory, row, *given)), half)

    meet_all(spec.ctas)
    if warp == allocator:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(Memory(spec).tmem, spec.tmem_columns)


def _set_registers(count: int) -> None:
    """From 128, which every thread has at launch."""
    if count < 128:
        cute.arch.setmaxregister_decrease(count)
    else:
        cute.arch.setmaxregister_increase(count)


def _loading(
    memory: Memory, loads: dict[str, Copy], lse: cute.Tensor, delta: cute.Tensor
) -> LoadWork:
    spec = memory.spec
    shapes = {"k": (TILE, spec.d), "q": (spec.queries, spec.d), "do": (spec.queries, spec.d_v)}
    shapes |= {"v": (TILE, spec.d_v)} if spec.with_k else {}
    operands = {
        x: Operand(*loads[x], memory.panels(x, (rows,), columns, rows))
        for x, (rows, columns) in shapes.items()
    }
    return LoadWork(spec, operands, lse, delta, memory.numbers)


def _issuing(memory: Memory) -> MmaWork:
    kinds = products(memory.spec)
    s, dp, dv, dk, dq = (kinds[x] for x in ("s", "dp", "dv", "dk", "dq"))
    spec = memory.spec
    scores = s.a(memory, "k"), s.b(memory, "q")
    of_v = dv.b(memory, "do") if spec.with_v else None
    of_k: tuple = (None, None, None)
    if spec.with_k:
        of_k = (dp.a(memory, "v"), dp.b(memory, "do")), dk.b(memory, "q"), _operands_of_dq(memory, dq)
    tmem = {name: memory.columns(name)(0).toint() for name in spec.tmem}
    instructions = {name: kind.instruction for name, kind in kinds.items()}
    return MmaWork(spec, instructions, Operands(scores, of_v, *of_k), tmem)


def _operands_of_dq(memory: Memory, dq: Product) -> tuple[InShared, InShared]:
    spec, whole = memory.spec, (1, None)
    if not spec.wide:
        return dq.a(memory, "ds", whole), dq.b(memory, "k")
    firsts = spec.dq_firsts
    apart = (firsts[-1] - firsts[0]) * TILE * 2  # bytes of the panels between two groups
    return dq.a(memory, "k", (len(firsts), apart)), dq.b(memory, "ds", whole)


def _adding(memory: Memory, row: Any, sums: Copy, turns: cute.Tensor) -> ReduceWork:
    staged = memory.panels("added", (WARP,), ADDED, dtype=cutlass.Float32)
    if memory.spec.wide:
        line: Any = memory.column("added", row // WARP, row % WARP)
    else:
        line = memory.row("added", row)
    dq = memory.columns("dq")(0)
    return ReduceWork(memory.spec, row, dq, line, Operand(*sums, staged), turns)


def _computing(
    memory: Memory, row: Any, half: Any, stores: dict[str, Copy], mods: GradMods, scale: Any
) -> ComputeWork:
    spec = memory.spec
    tmem = {name: memory.columns(name) for name in spec.tmem}
    panels = memory.panels("staged", (WARP,), PART)
    out = {name: Operand(*stores[name], panels) for name in stores}
    staged = memory.row("staged", row, half if spec.stages.staged > 1 else 0)
    ds = None
    if spec.with_k:
        # halves of 64 queries share rows of 128 bytes
        ds = memory.row("ds", row, 0, half * 4) if spec.wide else memory.row("ds", row, half)
    return ComputeWork(spec, row, tmem, ds, staged, out, memory.numbers, mods, scale)


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

    loads = {
        "k": copies(load, keys(k), (TILE,), spec.d, TILE),
        "v": copies(load, keys(v), (TILE,), spec.d_v, TILE),
        "q": copies(load, keys(q), (spec.queries,), spec.d, spec.queries),
        "do": copies(load, keys(grad_out), (spec.queries,), spec.d_v, spec.queries),
    }
    stores = {
        "dk": copies(store, keys(grad_k), (WARP,), PART, TILE),
        "dv": copies(store, keys(grad_v), (WARP,), PART, TILE),
    }
    of_q = cute.make_tensor(grad_q.iterator, cute.select(grad_q.layout, [1, 2, 0]))
    sums = copies(add, of_q, (WARP,), ADDED, TILE)
    lse, delta, turns = (
        cute.make_tensor(x.iterator, cute.select(x.layout, [1, 0])) for x in (lse, delta, turns)
    )
    backward_kernel(
        spec, loads, stores, sums, lse, delta, turns, items, runs, captured, grad_captured, scale
    ).launch(
        grid=[ctas, 1, 1], block=[spec.pipeline.threads, 1, 1], cluster=[spec.ctas, 1, 1],
        smem=spec.smem_bytes, min_blocks_per_mp=1, stream=stream,
    )  # fmt: skip
