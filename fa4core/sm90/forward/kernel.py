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

from fa4core.forward.mods import Mods
from fa4core.forward.source import stride
from fa4core.forward.views import batched, keys
from fa4core.forward.work import Plan, Share
from fa4core.pipeline.device import Barriers, copy_of, in_role, thread_of
from fa4core.pipeline.endpoint import Ends
from fa4core.sm90.forward.consumer import ConsumerWork, consumer
from fa4core.sm90.forward.epilogue import Epilogue
from fa4core.sm90.forward.load import LoadWork, load
from fa4core.sm90.forward.spec import ROWS, Spec

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


class Products:
    """The two tiled MMAs of a warpgroup, and the layouts that follow from them."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.dtype = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[spec.dtype]
        rows, d, d_v, keys = ROWS, spec.d, spec.d_v, spec.keys
        row, column = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        self.qk_tile, self.pv_tile = (rows, keys, d), (rows, d_v, keys)
        make_a, make_b = sm90.make_smem_layout_a, sm90.make_smem_layout_b
        self.q_layout = self._in("q", make_a(row, self.qk_tile, self.dtype, 1))
        self.k_layout = self._in("k", make_b(row, self.qk_tile, self.dtype, 1))
        self.v_layout = self._in("v", make_b(column, self.pv_tile, self.dtype, 1))
        rows_of = sm90.make_smem_layout_epi(self.dtype, row, (rows, d_v), 1)
        self.rows_layout = self._in("rows", rows_of)

    def qk(self) -> cute.TiledMma:
        return self._mma(K_MAJOR, self.qk_tile, warpgroup.OperandSource.SMEM)

    def pv(self) -> cute.TiledMma:
        return self._mma(MN_MAJOR, self.pv_tile, warpgroup.OperandSource.RMEM)

    def _mma(self, b_major: Any, tile: tuple, source: Any) -> cute.TiledMma:
        return sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, K_MAJOR, b_major, cutlass.Float32, (1, 1, 1), tile[:2], source
        )

    def _in(self, region: str, layout: cute.ComposedLayout) -> cute.ComposedLayout:
        """The same tile, once for each stage of a region of shared memory."""
        placed = self.spec.smem[region]
        stride = placed.stride * 8 // self.dtype.width
        stages = cute.make_layout(placed.region.stages, stride=stride)
        one = cute.select(layout, mode=[0, 1])
        return cute.make_composed_layout(one.inner, 0, cute.append(one.outer, stages))


@cute.kernel
def forward_kernel(
    spec: cutlass.Constexpr,
    load_q: cute.CopyAtom,
    q: cute.Tensor,
    load_k: cute.CopyAtom,
    k: cute.Tensor,
    load_v: cute.CopyAtom,
    v: cute.Tensor,
    store: cute.CopyAtom,
    out: cute.Tensor,
    lse: cute.Tensor,
    row_max: cute.Tensor,
    items: cute.Tensor,
    runs: cute.Tensor,
    captured: tuple,
    scale: cutlass.Float32,
):
    pipeline, products = spec.pipeline, Products(spec)
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    first, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    memory = cutlass.memory.SmemAllocator().allocate(spec.smem_bytes, 1024)

    pointer = memory + spec.smem["barriers"].offset
    barriers = Barriers(pipeline, cute.recast_ptr(pointer, dtype=cutlass.Int64))
    s_q = _operand(memory, spec, "q", products.q_layout, products.dtype)
    s_k = _operand(memory, spec, "k", products.k_layout, products.dtype)
    s_v = _operand(memory, spec, "v", products.v_layout, products.dtype)
    s_rows = _operand(memory, spec, "rows", products.rows_layout, products.dtype)

    if thread == 0:
        barriers.initialise()
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    registers = {role.name: role.registers for role in pipeline.roles}
    count, uniform = cute.size(items, mode=[0]), cute.arch.make_warp_uniform
    plan = Plan(items, runs, count, stride(first, step), Share(spec.tiles), uniform)
    mods = Mods(spec, captured)

    t = copy_of(pipeline, "consumer", warp)
    if in_role(pipeline, "load", warp):
        cute.arch.setmaxregister_decrease(registers["load"])
        operands = {"q": (load_q, q, s_q), "k": (load_k, k, s_k), "v": (load_v, v, s_v)}
        load(LoadWork(spec, operands), plan, Ends(pipeline, "load", barriers))
    if in_role(pipeline, "spare", warp):
        cute.arch.setmaxregister_decrease(registers["spare"])
    if in_role(pipeline, "consumer", warp):
        cute.arch.setmaxregister_increase(registers["consumer"])
        member = thread_of(pipeline, "consumer", thread)
        epilogue = (s_rows, store, out, lse, row_max, mods, scale)
        work = _consumer_work(spec, products, t, member, s_q, s_k, s_v, mods, scale, epilogue)
        consumer(work, plan, Ends(pipeline, "consumer", barriers), t)


def _operand(
    memory: cute.Pointer, spec: Spec, name: str, layout: cute.ComposedLayout, dtype: Any
) -> cute.Tensor:
    pointer = cute.recast_ptr(memory + spec.smem[name].offset, layout.inner, dtype=dtype)
    return cute.make_tensor(pointer, layout.outer)


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
        pv.make_fragment_A(pv.partition_shape_A((ROWS, spec.keys))),
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
    items: cute.Tensor,
    runs: cute.Tensor,
    captured: tuple,
    scale: cutlass.Float32,
    ctas: cutlass.Int32,
    stream: cuda.CUstream,
    spec: cutlass.Constexpr,
):
    """q, k, v, out: (batch, rows, heads, d), lse and row_max: (batch, heads, rows), packed tensors
    without a batch; items and runs: see `tables`."""
    q, k, v, out = (batched(tensor, 4) for tensor in (q, k, v, out))
    lse, row_max = (batched(rows, 3) for rows in (lse, row_max))
    products = Products(spec)
    inward, outward = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
    load_q, g_q = _tma(inward, keys(q), products.q_layout, (ROWS, spec.d))
    load_k, g_k = _tma(inward, keys(k), products.k_layout, (spec.keys, spec.d))
    load_v, g_v = _tma(inward, _transposed(keys(v)), products.v_layout, (spec.d_v, spec.keys))
    store, g_out = _tma(outward, keys(out), products.rows_layout, (ROWS, spec.d_v))
    by_row = [
        cute.make_tensor(x.iterator, cute.select(x.layout, [2, 1, 0])) for x in (lse, row_max)
    ]
    forward_kernel(
        spec, load_q, g_q, load_k, g_k, load_v, g_v, store, g_out, *by_row, items, runs, captured,
        scale,
    ).launch(
        grid=[ctas, 1, 1], block=[spec.pipeline.threads, 1, 1], min_blocks_per_mp=1, stream=stream
    )  # fmt: skip


def _tma(
    op: Any, view: cute.Tensor, layout: cute.ComposedLayout, shape: tuple
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """TMA's copy of one tile and its view of a tensor."""
    return cpasync.make_tiled_tma_atom(op, view, cute.select(layout, mode=[0, 1]), shape)


def _transposed(view: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(view.iterator, cute.select(view.layout, mode=[1, 0, 2, 3, 4]))
