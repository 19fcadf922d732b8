"""The forward kernel: memory, barriers, and which warp runs which role.

Assembles what the role files need from a `Spec`'s declaration; `launch` compiles and calls it.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.blackwell_helpers as sm100
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from fa4core.pipeline.device import LEADER, Barriers, role_of, thread_of
from fa4core.pipeline.endpoint import Ends
from fa4core.sm100.forward import views
from fa4core.sm100.forward.correction import CorrectionWork, correction
from fa4core.sm100.forward.load import LoadWork, load
from fa4core.sm100.forward.mma import MmaWork, mma
from fa4core.sm100.forward.mods import Mods
from fa4core.sm100.forward.softmax import SoftmaxWork, softmax
from fa4core.sm100.forward.source import Answers, queue, scheduler, stride
from fa4core.sm100.forward.spec import TILE, Spec
from fa4core.sm100.forward.store import StoreWork, store
from fa4core.sm100.forward.work import Plan, Share
from fa4core.sm100.umma import InShared, Instruction

_DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


def out_type(spec: Spec) -> Any:
    return cutlass.Float32 if spec.split else _DTYPES[spec.dtype]


def group(spec: Spec) -> tcgen05.CtaGroup:
    return tcgen05.CtaGroup.ONE if spec.ctas == 1 else tcgen05.CtaGroup.TWO


class Products:
    """The two tiled MMAs and the layouts that follow from them."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.dtype = _DTYPES[spec.dtype]
        rows = TILE * spec.ctas
        self.qk_tile, self.pv_tile = (rows, TILE, spec.d), (rows, spec.d_v, TILE)
        self.group = group(spec)
        qk, pv = self.qk(), self.pv()
        self.q_layout = sm100.make_smem_layout_a(qk, self.qk_tile, self.dtype, spec.tiles)
        k = sm100.make_smem_layout_b(qk, self.qk_tile, self.dtype, spec.kv_stages)
        v = sm100.make_smem_layout_b(pv, self.pv_tile, self.dtype, spec.kv_stages)
        self.k_layout, self.v_layout = self._in_ring(k), self._in_ring(v)

    def qk(self) -> cute.TiledMma:
        return self._mma(K_MAJOR, self.qk_tile)

    def pv(self) -> cute.TiledMma:
        return self._mma(MN_MAJOR, self.pv_tile, tcgen05.OperandSource.TMEM)

    def _mma(self, b_major: Any, tile: tuple, *source: Any) -> cute.TiledMma:
        return sm100.make_trivial_tiled_mma(
            self.dtype, self.dtype, K_MAJOR, b_major, cutlass.Float32, self.group,
            tile[:2], *source,
        )  # fmt: skip

    def _in_ring(self, layout: cute.ComposedLayout) -> cute.ComposedLayout:
        """The same tiles, one for each stage of the ring that K and V share."""
        ring = cute.make_layout(
            self.spec.kv_stages, stride=self.spec.kv_bytes * 8 // self.dtype.width
        )
        one = cute.select(layout, mode=[0, 1, 2])
        return cute.make_composed_layout(one.inner, 0, cute.append(one.outer, ring))


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
    page_table: cute.Tensor,
    captured: tuple,
    scale: cutlass.Float32,
):
    pipeline, products = spec.pipeline, Products(spec)
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    pair = spec.ctas > 1
    cta = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if pair else 0
    memory = cutlass.memory.SmemAllocator().allocate(spec.smem_bytes, 1024)

    barriers = Barriers(pipeline, _at(memory, spec, "barriers", cutlass.Int64))
    address = _at(memory, spec, "address", cutlass.Int32)
    stats = cute.make_tensor(
        _at(memory, spec, "stats", cutlass.Float32),
        cute.make_layout((2, TILE, spec.tiles), stride=(TILE, 1, 2 * TILE)),
    )
    s_q = _operand(memory, spec, "q", products.q_layout, products.dtype)
    s_k = _operand(memory, spec, "kv", products.k_layout, products.dtype)
    s_v = _operand(memory, spec, "kv", products.v_layout, products.dtype)

    allocator = pipeline.role("mma").first
    if thread == 0:
        barriers.initialise()
    cute.arch.mbarrier_init_fence()
    _clear_idle_rows(memory, spec, thread)
    if warp == allocator:
        cute.arch.alloc_tmem(spec.tmem_columns, address, pair)
    _meet(spec)
    tmem = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, address)

    registers = {role.name: role.registers for role in pipeline.roles}
    count = cute.size(items, mode=[0])
    answers = Answers(_at(memory, spec, "answers", cutlass.Int128), count, spec.ctas)
    share = Share(spec.tiles, cta, spec.ctas)
    plan = Plan(items, runs, count, lambda ends: _source(spec, answers, ends), share)
    mods = Mods(spec, captured)

    is_load, _ = role_of(pipeline, "load", warp)
    is_mma, _ = role_of(pipeline, "mma", warp)
    is_scheduler, _ = role_of(pipeline, "scheduler", warp)
    is_store, _ = role_of(pipeline, "store", warp)
    is_softmax, t = role_of(pipeline, "softmax", warp)
    is_correction, _ = role_of(pipeline, "correction", warp)
    if is_load:
        cute.arch.setmaxregister_decrease(registers["load"])
        operands = {
            "q": (load_q, q, _panels(memory, spec, "q", views.q_rows(spec), spec.d)),
            "k": (load_k, k, _panels(memory, spec, "kv", (spec.k_rows,), spec.d, spec.keys)),
            "v": (load_v, v, _panels(memory, spec, "kv", (spec.key_rows,), spec.columns)),
        }
        load(LoadWork(spec, operands, page_table, cta), plan, Ends(pipeline, "load", barriers))
    if is_scheduler:
        cute.arch.setmaxregister_decrease(registers["scheduler"])
        if cutlass.const_expr(spec.dynamic):  # noqa: SIM102 (decided when compiling; the other is not)
            if cta == LEADER:
                scheduler(answers, plan, Ends(pipeline, "scheduler", barriers))
    if is_store:
        cute.arch.setmaxregister_decrease(registers["store"])
        place = lse.shape[0], q.shape[4]
        staged = _panels(memory, spec, "out", views.q_rows(spec), spec.out_columns)
        storing = StoreWork(spec, store_out, out, staged, place)
        store(storing, plan, Ends(pipeline, "store", barriers))
    if is_mma:
        cute.arch.setmaxregister_decrease(registers["mma"])
        if cta == LEADER:
            issuing = _mma_work(spec, products, tmem, s_q, s_k, s_v)
            mma(issuing, plan, Ends(pipeline, "mma", barriers))
    if is_correction:
        cute.arch.setmaxregister_decrease(registers["correction"])
        finishing = CorrectionWork(
            spec, thread_of(pipeline, "correction", thread), _columns(spec, tmem, "o"), stats,
            mods, _staged(memory, spec), lse, row_max, q.shape[4],
        )  # fmt: skip
        correction(finishing, plan, Ends(pipeline, "correction", barriers))
    if is_softmax:
        cute.arch.setmaxregister_increase(registers["softmax"])
        weighing = SoftmaxWork(
            spec, thread_of(pipeline, "softmax", thread), _columns(spec, tmem, "s"),
            _columns(spec, tmem, "p"), stats, mods, scale, row_max, q.shape[4],
        )  # fmt: skip
        softmax(weighing, plan, Ends(pipeline, "softmax", barriers), t)

    _meet(spec)
    if warp == allocator:
        cute.arch.relinquish_tmem_alloc_permit(pair)
        cute.arch.dealloc_tmem(tmem, spec.tmem_columns, pair)


def _meet(spec: Spec) -> None:
    """All threads of the CTAs that share memory."""
    if spec.ctas == 1:
        cute.arch.sync_threads()
    else:
        cute.arch.cluster_arrive(aligned=True)
        cute.arch.cluster_wait()


def _source(spec: Spec, answers: Answers, ends: Ends) -> Any:
    """Begins in each role anew: a value that all of them keep would be spilled."""
    first, _, _ = cute.arch.block_idx()
    step, _, _ = cute.arch.grid_dim()
    begin, step = first // spec.ctas, step // spec.ctas
    source = queue(begin, lambda _: answers) if spec.dynamic else stride(begin, step)
    return source(ends)


def _at(memory: cute.Pointer, spec: Spec, name: str, dtype: Any) -> cute.Pointer:
    return cute.recast_ptr(memory + spec.smem[name].offset, dtype=dtype)


def _operand(
    memory: cute.Pointer, spec: Spec, name: str, layout: cute.ComposedLayout, dtype: Any
) -> cute.Tensor:
    pointer = cute.recast_ptr(memory + spec.smem[name].offset, layout.inner, dtype=dtype)
    return cute.make_tensor(pointer, layout.outer)


def _panels(
    memory: cute.Pointer,
    spec: Spec,
    name: str,
    rows: tuple[int, ...],
    columns: int,
    height: int = TILE,
) -> cute.Tensor:
    """A region's tiles as TMA fills them; the last modes are the copy and the stage."""
    region, layout = spec.smem[name], views.box(rows, columns, height)
    dtype, count = out_type(spec) if name == "out" else _DTYPES[spec.dtype], math.prod(rows)
    copies = cute.make_layout(height // count, stride=count * views.panel(columns))
    layout = cute.append(layout, copies)
    stages = cute.make_layout(region.region.stages, stride=region.stride * 8 // dtype.width)
    pointer = cute.recast_ptr(memory + region.offset, views.swizzle(columns, dtype), dtype=dtype)
    return cute.make_tensor(pointer, cute.append(layout, stages))


def _staged(memory: cute.Pointer, spec: Spec) -> cute.Tensor:
    """Staged parts of O as (row, column, stage)."""
    region, columns = spec.smem["out"], spec.out_columns
    swizzle = cute.make_swizzle(3, 4, 3)
    pointer = cute.recast_ptr(memory + region.offset, swizzle, dtype=out_type(spec))
    stages = region.region.stages
    layout = cute.make_layout((TILE, columns, stages), stride=(columns, 1, TILE * columns))
    return cute.make_tensor(pointer, layout)


def _clear_idle_rows(memory: cute.Pointer, spec: Spec, thread: Any) -> None:
    """Zeros in the rows of Q that no load ever fills: there are some where 128 % packed != 0."""
    width, idle = views.panel(spec.d), TILE - spec.rows
    words = idle * width * 2 // 4
    for t in range(spec.tiles if idle else 0):
        for first in range(0, TILE * spec.d, TILE * width):
            behind = spec.smem["q"].at(t) + (first + spec.rows * width) * 2
            _clear(cute.recast_ptr(memory + behind, dtype=cutlass.Int32), words, spec, thread)
    if idle:
        cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def _clear(words: cute.Pointer, count: cutlass.Constexpr, spec: cutlass.Constexpr, thread: Any):
    to = cute.make_tensor(words, cute.make_layout(count))
    for i in range(thread, count, spec.pipeline.threads):
        to[i] = 0


def _columns(spec: Spec, tmem: cute.Pointer, name: str) -> Any:
    """Where each tile's stage of a region of tensor memory is."""
    return lambda t: tmem + spec.tmem[name].at(t)


def _mma_work(spec: Spec, products: Products, tmem: cute.Pointer, q, k, v) -> MmaWork:
    qk, pv = products.qk(), products.pv()
    s, p, o = (
        [(tmem + spec.tmem[name].at(t)).toint() for t in range(spec.tiles)]
        for name in ("s", "p", "o")
    )
    return MmaWork(
        spec,
        Instruction(*products.qk_tile[:2], products.dtype, K_MAJOR, spec.ctas),
        Instruction(*products.pv_tile[:2], products.dtype, MN_MAJOR, spec.ctas),
        InShared(qk.make_fragment_A(q)),
        InShared(qk.make_fragment_B(k)),
        InShared(pv.make_fragment_B(v)),
        s, p, o,
    )  # fmt: skip


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
    page_table: cute.Tensor,
    captured: tuple,
    scale: cutlass.Float32,
    ctas: cutlass.Int32,
    stream: cuda.CUstream,
    spec: cutlass.Constexpr,
):
    """q, k, v, out: (batch, rows, heads, d), packed tensors with batch 1; lse and row_max: (batch,
    heads, rows); items and runs: see `work.tables`. In pages, k and v: (pages, rows, heads, d)."""
    by_tma = cpasync.CopyBulkTensorTileG2SOp(group(spec))

    to_global = cpasync.CopyBulkTensorTileS2GOp()

    def atom(
        view: cute.Tensor, rows: tuple[int, ...], columns: int, height: int = TILE, by: Any = by_tma
    ) -> tuple:
        layout = views.swizzled(views.box(rows, columns, height), columns, view.element_type)
        return cpasync.make_tiled_tma_atom(by, view, layout, (*rows, columns))

    load_q, g_q = atom(views.queries(q, spec), views.q_rows(spec), spec.d)
    load_k, g_k = atom(views.keys(k), (spec.k_rows,), spec.d, spec.keys)
    load_v, g_v = atom(views.keys(v), (spec.key_rows,), spec.columns)
    rows, columns = views.q_rows(spec), spec.out_columns
    store_out, g_out = atom(views.results(out, spec), rows, columns, by=to_global)
    by_row = [
        cute.make_tensor(x.iterator, cute.select(x.layout, [2, 1, 0])) for x in (lse, row_max)
    ]
    forward_kernel(
        spec, load_q, g_q, load_k, g_k, load_v, g_v, store_out, g_out, *by_row, items, runs,
        page_table, captured, scale,
    ).launch(
        grid=[ctas, 1, 1], block=[spec.pipeline.threads, 1, 1], cluster=[spec.ctas, 1, 1],
        min_blocks_per_mp=1, stream=stream,
    )  # fmt: skip
