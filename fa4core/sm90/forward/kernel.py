"""The Hopper forward kernel: memory, barriers, and which warp runs which role.

Assembles what the role files need from a `Spec`'s declaration; `launch` compiles and calls it.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import LayoutEnum

from fa4core.forward.combine import followed_by_combine
from fa4core.forward.mods import Mods
from fa4core.forward.panels import boxes, clear_rows
from fa4core.forward.source import stride
from fa4core.forward.tma import Operand, copies
from fa4core.forward.views import batched, by_rows, keys, queries, results
from fa4core.forward.work import Plan, Share
from fa4core.pipeline.device import Barriers, copy_of, in_role, thread_of
from fa4core.pipeline.endpoint import Ends
from fa4core.sm90.forward.consumer import ConsumerWork, consumer
from fa4core.sm90.forward.epilogue import Epilogue
from fa4core.sm90.forward.load import LoadWork, load
from fa4core.sm90.forward.spec import ROWS, Spec
from fa4core.sm90.memory import dtype_of, staged, tensor_in

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


class Products:
    """The two tiled MMAs of a warpgroup, and the layouts that follow from them."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.dtype = dtype_of(spec)
        rows, d, d_v, keys = ROWS, spec.d, spec.d_v, spec.block
        row, column = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        self.qk_tile, self.pv_tile = (rows, keys, d), (rows, d_v, keys)
        make_a, make_b = sm90.make_smem_layout_a, sm90.make_smem_layout_b
        self.q_layout = staged(spec, "q", make_a(row, self.qk_tile, self.dtype, 1), self.dtype)
        self.k_layout = staged(spec, "k", make_b(row, self.qk_tile, self.dtype, 1), self.dtype)
        self.v_layout = staged(spec, "v", make_b(column, self.pv_tile, self.dtype, 1), self.dtype)

    @property
    def rows_layout(self) -> cute.ComposedLayout:
        """Of finished rows."""
        rows = ROWS, self.spec.d_v
        layout = sm90.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, rows, 1)
        return staged(self.spec, "rows", layout, self.dtype)

    def qk(self) -> cute.TiledMma:
        return self._mma(K_MAJOR, self.qk_tile, warpgroup.OperandSource.SMEM)

    def pv(self) -> cute.TiledMma:
        return self._mma(MN_MAJOR, self.pv_tile, warpgroup.OperandSource.RMEM)

    def _mma(self, b_major: Any, tile: tuple, source: Any) -> cute.TiledMma:
        return sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, K_MAJOR, b_major, cutlass.Float32, (1, 1, 1), tile[:2], source
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
    store: cute.CopyAtom | None,
    out: cute.Tensor,
    lse: cute.Tensor,
    row_max: cute.Tensor,
    items: cute.Tensor,
    runs: cute.Tensor,
    lists: cute.Tensor,
    pages: tuple,
    captured: tuple,
    scale: cutlass.Float32,
):
    pipeline, products = spec.pipeline, Products(spec)
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    memory = cutlass.memory.SmemAllocator().allocate(spec.smem_bytes, 1024)

    pointer = memory + spec.smem["barriers"].offset
    barriers = Barriers(pipeline, cute.recast_ptr(pointer, dtype=cutlass.Int64))
    s_q = tensor_in(memory, spec, "q", products.q_layout, products.dtype)
    s_k = tensor_in(memory, spec, "k", products.k_layout, products.dtype)
    s_v = tensor_in(memory, spec, "v", products.v_layout, products.dtype)
    s_rows = None
    if cutlass.const_expr(not spec.split):
        s_rows = tensor_in(memory, spec, "rows", products.rows_layout, products.dtype)

    if thread == 0:
        barriers.initialise()
    cute.arch.mbarrier_init_fence()
    clear_rows(memory, spec.smem["q"], spec.rows, spec.d, ROWS, thread, pipeline.threads)
    cute.arch.sync_threads()

    registers = {role.name: role.registers for role in pipeline.roles}
    mods = Mods(spec, captured)

    t = copy_of(pipeline, "consumer", warp)
    if in_role(pipeline, "load", warp):
        cute.arch.setmaxregister_decrease(registers["load"])
        operands = {"q": (load_q, q), "k": (load_k, k), "v": (load_v, v)}
        plan = _plan(spec, items, runs, lists)
        load(_loading(spec, memory, operands, pages), plan, Ends(pipeline, "load", barriers))
    if in_role(pipeline, "spare", warp):
        cute.arch.setmaxregister_decrease(registers["spare"])
    if in_role(pipeline, "consumer", warp):
        cute.arch.setmaxregister_increase(registers["consumer"])
        member = thread_of(pipeline, "consumer", thread)
        batches = q.shape[3] if spec.packed == 1 else q.shape[4]
        finished = _results(spec, memory, store, out)
        epilogue = (s_rows, finished, lse, row_max, batches, mods, scale)
        work = _consumer_work(spec, products, t, member, s_q, s_k, s_v, mods, scale, epilogue)
        plan = _plan(spec, items, runs, lists)
        consumer(work, plan, Ends(pipeline, "consumer", barriers), t)


def _plan(spec: Spec, items: cute.Tensor, runs: cute.Tensor, lists: cute.Tensor) -> Plan:
    """The CTA's; each role reads its own, because one for all would be spilled."""
    cta, _, _ = cute.arch.block_idx()
    uniform = cute.arch.make_warp_uniform
    begin, end = (uniform(lists[cta + i]) for i in range(2))
    return Plan(items, runs, end, stride(begin, 1), Share(spec.tiles), uniform)


def _loading(spec: Spec, memory: cute.Pointer, operands: dict, pages: tuple) -> LoadWork:
    shapes = {
        "q": (_q_rows(spec), spec.d, ROWS),
        "k": ((spec.key_rows,), spec.d, spec.block),
        "v": ((spec.key_rows,), spec.d_v, spec.block),
    }
    shared = {x: boxes(memory, spec.smem[x], *shapes[x], dtype_of(spec)) for x in shapes}
    found = {x: Operand(atom, view, shared[x]) for x, (atom, view) in operands.items()}
    return LoadWork(spec, found, pages)


def _results(spec: Spec, memory: cute.Pointer, store: Any, out: cute.Tensor) -> Any:
    if spec.split:
        return out
    placed = spec.smem["rows"]
    return Operand(store, out, boxes(memory, placed, _q_rows(spec), spec.d_v, ROWS, dtype_of(spec)))


def _q_rows(spec: Spec) -> tuple[int, ...]:
    return (ROWS,) if spec.packed == 1 else spec.q_rows


def _consumer_work(
    spec: Spec, products: Products, t, member, q, k, v, mods: Mods, scale, epilogue: tuple
) -> ConsumerWork:
    qk, pv = products.qk(), products.pv()
    scores = qk.partition_shape_C(products.qk_tile[:2])
    output = pv.partition_shape_C(products.pv_tile[:2])
    return ConsumerWork(
        spec,
        products.qk,
        products.pv,
        qk.make_fragment_A(qk.get_slice(0).partition_A(q)),
        qk.make_fragment_B(qk.get_slice(0).partition_B(k)),
        pv.make_fragment_B(pv.get_slice(0).partition_B(v)),
        cute.make_rmem_tensor(scores, cutlass.Float32),
        pv.make_fragment_A(pv.partition_shape_A((ROWS, spec.block))),
        cute.make_rmem_tensor(output, cutlass.Float32),
        mods,
        scale,
        Epilogue(spec, t, member, pv, *epilogue),
    )


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
    without a batch; tables: items, runs and lists of `Metadata`. In pages, k and v: (pages, rows,
    heads, d)."""
    q, k, v, out = (batched(tensor, 4) for tensor in (q, k, v, out))
    lse, row_max = (batched(rows, 3) for rows in (lse, row_max))
    inward, outward = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    plain = spec.packed == 1
    of_q = keys(q) if plain else queries(q, spec.packed)
    load_q, g_q = copies(inward, of_q, _q_rows(spec), spec.d, ROWS)
    load_k, g_k = copies(inward, keys(k), (spec.key_rows,), spec.d, spec.block)
    load_v, g_v = copies(inward, keys(v), (spec.key_rows,), spec.d_v, spec.block)
    store, g_out = None, by_rows(out)  # shares of keys leave float32, straight from registers
    if cutlass.const_expr(not spec.split):
        of_out = keys(out) if plain else results(out, spec.packed)
        store, g_out = copies(outward, of_out, _q_rows(spec), spec.d_v, ROWS)
    by_row = [
        cute.make_tensor(x.iterator, cute.select(x.layout, [2, 1, 0])) for x in (lse, row_max)
    ]
    forward_kernel(
        spec, load_q, g_q, load_k, g_k, load_v, g_v, store, g_out, *by_row, *tables, pages,
        captured, scale,
    ).launch(
        grid=[ctas, 1, 1], block=[spec.pipeline.threads, 1, 1], min_blocks_per_mp=1, stream=stream
    )  # fmt: skip


forward_and_combine = followed_by_combine(forward)
