"""The forward kernel: memory, barriers, and which warp runs which role.

Assembles what the role files need from a `Spec`'s declaration; `launch` compiles and calls it.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from fa4core.forward.combine import followed_by_combine
from fa4core.forward.mods import Mods
from fa4core.forward.panels import clear_rows
from fa4core.forward.source import scheduler
from fa4core.forward.tma import Operand, copies
from fa4core.forward.views import batched, keys, queries, results
from fa4core.forward.work import Plan
from fa4core.pipeline.device import LEADER, copy_of, in_role, thread_of
from fa4core.sm100.begin import Begin, meet_all
from fa4core.sm100.forward.correction import CorrectionWork, correction
from fa4core.sm100.forward.load import LoadWork, load
from fa4core.sm100.forward.memory import Memory, out_type
from fa4core.sm100.forward.mma import MmaWork, mma
from fa4core.sm100.forward.softmax import SoftmaxWork, softmax
from fa4core.sm100.forward.spec import TILE, Spec
from fa4core.sm100.forward.store import StoreWork, store
from fa4core.sm100.memory import DTYPES
from fa4core.sm100.product import MN_MAJOR, Product, group


def products(spec: Spec) -> tuple[Product, Product]:
    """S = Q K^T, and O = P V."""
    dtype, rows = DTYPES[spec.dtype], TILE * spec.ctas
    return (
        Product(dtype, (rows, TILE, spec.d), spec.ctas),
        Product(
            dtype, (rows, spec.d_v, TILE), spec.ctas, b_major=MN_MAJOR, a_in_tensor_memory=True
        ),
    )


@cute.kernel
def forward_kernel(
    spec: cutlass.Constexpr,
    load_q: cute.CopyAtom,
    q: cute.Tensor,
    load_k: cute.CopyAtom,
    k: cute.Tensor,
    load_v: cute.CopyAtom,
    v: cute.Tensor,
    store_out: cute.CopyAtom,
    out: cute.Tensor,
    lse: cute.Tensor,
    row_max: cute.Tensor,
    items: cute.Tensor,
    runs: cute.Tensor,
    pages: tuple,
    captured: tuple,
    scale: cutlass.Float32,
):
    pipeline = spec.pipeline
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    pair = spec.ctas > 1
    cta = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if pair else 0

    allocator = pipeline.role("mma").first
    prologue = Memory(spec)
    if thread == 0:
        prologue.barriers.initialise()
    cute.arch.mbarrier_init_fence()
    clear_rows(
        prologue.begin, spec.smem["q"], spec.rows, spec.d, TILE, thread, pipeline.threads
    )  # where heads are packed, no load fills the last rows
    if warp == allocator:
        cute.arch.alloc_tmem(spec.tmem_columns, prologue.address, pair)
    meet_all(spec.ctas)

    registers = {role.name: role.registers for role in pipeline.roles}
    begin, mods = Begin(spec, Memory, Plan, items, runs, cta), Mods(spec, captured)
    batches = q.shape[4]
    t = copy_of(pipeline, "softmax", warp)  # here: in the role the compiler finds it not uniform
    if in_role(pipeline, "load", warp):
        cute.arch.setmaxregister_decrease(registers["load"])
        operands = {"q": (load_q, q), "k": (load_k, k), "v": (load_v, v)}
        load(*begin("load", lambda memory: _loading(memory, operands, pages, cta)))
    if in_role(pipeline, "scheduler", warp):
        cute.arch.setmaxregister_decrease(registers["scheduler"])
        if cutlass.const_expr(spec.dynamic):  # noqa: SIM102 (one when compiling)
            if cta == LEADER:
                scheduler(*begin("scheduler", begin.answers))
    if in_role(pipeline, "store", warp):
        cute.arch.setmaxregister_decrease(registers["store"])
        place = lse.shape[0], batches
        store(*begin("store", lambda memory: _storing(memory, store_out, out, place)))
    if in_role(pipeline, "mma", warp):
        cute.arch.setmaxregister_decrease(registers["mma"])
        if cta == LEADER:
            mma(*begin("mma", _issuing))
    if in_role(pipeline, "correction", warp):
        cute.arch.setmaxregister_decrease(registers["correction"])
        row = thread_of(pipeline, "correction", thread)
        results = mods, lse, row_max, batches
        correction(*begin("correction", lambda memory: _finishing(memory, row, *results)))
    if in_role(pipeline, "softmax", warp):
        cute.arch.setmaxregister_increase(registers["softmax"])
        row = thread_of(pipeline, "softmax", thread)
        scaled = mods, scale, row_max, batches
        softmax(*begin("softmax", lambda memory: _weighing(memory, row, *scaled)), t)

    meet_all(spec.ctas)
    if warp == allocator:
        cute.arch.relinquish_tmem_alloc_permit(pair)
        cute.arch.dealloc_tmem(Memory(spec).tmem, spec.tmem_columns, pair)


def _loading(memory: Memory, operands: dict, pages: tuple, cta: Any) -> LoadWork:
    spec = memory.spec
    shared = {
        "q": memory.panels("q", spec.q_rows, spec.d),
        "k": memory.panels("kv", (spec.k_rows,), spec.d, spec.keys),
        "v": memory.panels("kv", (spec.key_rows,), spec.columns),
    }
    found = {x: Operand(atom, view, shared[x]) for x, (atom, view) in operands.items()}
    return LoadWork(spec, found, pages, cta)


def _storing(memory: Memory, atom: cute.CopyAtom, out: cute.Tensor, place: tuple) -> StoreWork:
    spec = memory.spec
    rows, columns = spec.q_rows, spec.out_columns
    staged = memory.panels("out", rows, columns, dtype=out_type(spec))
    return StoreWork(spec, Operand(atom, out, staged), place)


def _finishing(memory: Memory, row: Any, mods: Mods, lse, row_max, batches) -> CorrectionWork:
    o, stats, staged = memory.columns("o"), memory.stats, memory.row("out", row)
    return CorrectionWork(memory.spec, row, o, stats, mods, staged, lse, row_max, batches)


def _weighing(memory: Memory, row: Any, mods: Mods, scale, row_max, batches) -> SoftmaxWork:
    s, p, stats = memory.columns("s"), memory.columns("p"), memory.stats
    return SoftmaxWork(memory.spec, row, s, p, stats, mods, scale, row_max, batches)


def _issuing(memory: Memory) -> MmaWork:
    spec = memory.spec
    qk, pv = products(spec)
    s, p, o = (
        [memory.columns(name)(t).toint() for t in range(spec.tiles)] for name in ("s", "p", "o")
    )
    return MmaWork(
        spec, qk.instruction, pv.instruction, qk.a(memory, "q"), qk.b(memory, "kv"),
        pv.b(memory, "kv"), s, p, o,
    )  # fmt: skip


@cute.jit
def forward(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    row_max: cute.Tensor,
    tables: tuple,
    pages: tuple,
    captured: tuple,
    scale: cutlass.Float32,
    ctas: cutlass.Int32,
    stream: cuda.CUstream,
    spec: cutlass.Constexpr,
):
    """q, k, v, out: (batch, rows, heads, d), lse and row_max: (batch, heads, rows), packed tensors
    without a batch; tables: items and runs of `Metadata`. In pages, k and v: (pages, rows, heads,
    d)."""
    q, k, v, out = (batched(tensor, 4) for tensor in (q, k, v, out))
    lse, row_max = (batched(rows, 3) for rows in (lse, row_max))
    inward, outward = (
        cpasync.CopyBulkTensorTileG2SOp(group(spec.ctas)),
        cpasync.CopyBulkTensorTileS2GOp(),
    )
    load_q, g_q = copies(inward, queries(q, spec.packed), spec.q_rows, spec.d, TILE)
    load_k, g_k = copies(inward, keys(k), (spec.k_rows,), spec.d, spec.keys)
    load_v, g_v = copies(inward, keys(v), (spec.key_rows,), spec.columns, TILE)
    store_out, g_out = copies(
        outward, results(out, spec.packed), spec.q_rows, spec.out_columns, TILE
    )
    by_row = [
        cute.make_tensor(x.iterator, cute.select(x.layout, [2, 1, 0])) for x in (lse, row_max)
    ]
    forward_kernel(
        spec, load_q, g_q, load_k, g_k, load_v, g_v, store_out, g_out, *by_row, *tables, pages,
        captured, scale,
    ).launch(
        grid=[ctas, 1, 1], block=[spec.pipeline.threads, 1, 1], cluster=[spec.ctas, 1, 1],
        smem=spec.smem_bytes, min_blocks_per_mp=1, stream=stream,
    )  # fmt: skip


forward_and_combine = followed_by_combine(forward)
