"""The forward kernel: memory, barriers, and which warp runs which role.

Assembles what the role files need from a `Spec`'s declaration; `launch` compiles and calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.utils.blackwell_helpers as sm100
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from fa4core.forward.mods import Mods
from fa4core.forward.source import Answers, queue, scheduler, stride
from fa4core.forward.views import batched, keys
from fa4core.forward.work import Plan, Share
from fa4core.pipeline.device import LEADER, copy_of, in_role, thread_of
from fa4core.pipeline.effects import Fixed
from fa4core.pipeline.endpoint import Ends
from fa4core.sm100.forward import views
from fa4core.sm100.forward.correction import CorrectionWork, correction
from fa4core.sm100.forward.load import LoadWork, load
from fa4core.sm100.forward.memory import DTYPES, Memory
from fa4core.sm100.forward.mma import MmaWork, mma
from fa4core.sm100.forward.softmax import SoftmaxWork, softmax
from fa4core.sm100.forward.spec import TILE, Spec
from fa4core.sm100.forward.store import StoreWork, store
from fa4core.sm100.umma import InShared, Instruction

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN


def group(spec: Spec) -> tcgen05.CtaGroup:
    return tcgen05.CtaGroup.ONE if spec.ctas == 1 else tcgen05.CtaGroup.TWO


class Products:
    """The two tiled MMAs and the layouts that follow from them."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.dtype = DTYPES[spec.dtype]
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
    _clear_idle_rows(prologue, thread)
    if warp == allocator:
        cute.arch.alloc_tmem(spec.tmem_columns, prologue.address, pair)
    _meet(spec)

    registers = {role.name: role.registers for role in pipeline.roles}
    begin, mods = Begin(spec, items, runs, cta), Mods(spec, captured)
    batches = q.shape[4]
    t = copy_of(pipeline, "softmax", warp)  # here: in the role the compiler finds it not uniform
    if in_role(pipeline, "load", warp):
        cute.arch.setmaxregister_decrease(registers["load"])
        operands = {"q": (load_q, q), "k": (load_k, k), "v": (load_v, v)}
        load(*begin("load", lambda memory: _loading(memory, operands, page_table, cta)))
    if in_role(pipeline, "scheduler", warp):
        cute.arch.setmaxregister_decrease(registers["scheduler"])
        if cutlass.const_expr(spec.dynamic):  # noqa: SIM102 (decided when compiling; the other is not)
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

    _meet(spec)
    if warp == allocator:
        cute.arch.relinquish_tmem_alloc_permit(pair)
        cute.arch.dealloc_tmem(Memory(spec).tmem, spec.tmem_columns, pair)


def _meet(spec: Spec) -> None:
    """All threads of the CTAs that share memory."""
    if spec.ctas == 1:
        cute.arch.sync_threads()
    else:
        cute.arch.cluster_arrive(aligned=True)
        cute.arch.cluster_wait()


class Begin(Fixed):
    """What each role begins with, made anew in it: a value that all of them keep would be spilled.

    Attributes:
        items, runs: The plan's tables.
        cta: Rank of the CTA among those that share memory.
    """

    def __init__(self, spec: Spec, items: cute.Tensor, runs: cute.Tensor, cta: Any):
        self.spec, self.items, self.runs, self.cta = spec, items, runs, cta

    def __call__(self, role: str, work: Callable[[Memory], Any]) -> tuple[Any, Plan, Ends]:
        """The arguments of a role's function."""
        memory, spec = Memory(self.spec), self.spec
        share = Share(spec.tiles, self.cta, spec.ctas)
        plan = Plan(self.items, self.runs, self._count, self._source(memory), share)
        return work(memory), plan, Ends(spec.pipeline, role, memory.barriers)

    def answers(self, memory: Memory) -> Answers:
        return Answers(memory.at("answers", cutlass.Int128), self._count, self.spec.ctas)

    @property
    def _count(self) -> Any:
        return cute.size(self.items, mode=[0])

    def _source(self, memory: Memory) -> Callable[[Ends], Any]:
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        first, step = first // self.spec.ctas, step // self.spec.ctas
        if self.spec.dynamic:
            return queue(first, lambda _: self.answers(memory))
        return stride(first, step)


def _clear_idle_rows(memory: Memory, thread: Any) -> None:
    """Zeros in the rows of Q that no load ever fills: there are some where 128 % packed != 0."""
    spec = memory.spec
    width, idle = views.panel(spec.d), TILE - spec.rows
    words = idle * width * 2 // 4
    for t in range(spec.tiles if idle else 0):
        for panel in range(0, TILE * spec.d, TILE * width):
            behind = t * spec.smem["q"].stride + (panel + spec.rows * width) * 2
            _clear(memory.at("q", cutlass.Int32, behind), words, spec, thread)
    if idle:
        cute.arch.fence_proxy("async.shared", space="cta")


@cute.jit
def _clear(words: cute.Pointer, count: cutlass.Constexpr, spec: cutlass.Constexpr, thread: Any):
    to = cute.make_tensor(words, cute.make_layout(count))
    for i in range(thread, count, spec.pipeline.threads):
        to[i] = 0


def _columns(memory: Memory, name: str) -> Any:
    """Where each tile's stage of a region of tensor memory is."""
    tmem = memory.tmem
    return lambda t: tmem + memory.spec.tmem[name].at(t)


def _loading(memory: Memory, operands: dict, page_table: cute.Tensor, cta: Any) -> LoadWork:
    spec = memory.spec
    shared = {
        "q": memory.panels("q", views.q_rows(spec), spec.d),
        "k": memory.panels("kv", (spec.k_rows,), spec.d, spec.keys),
        "v": memory.panels("kv", (spec.key_rows,), spec.columns),
    }
    return LoadWork(spec, {x: (*operands[x], shared[x]) for x in shared}, page_table, cta)


def _storing(memory: Memory, atom: cute.CopyAtom, out: cute.Tensor, place: tuple) -> StoreWork:
    spec = memory.spec
    return StoreWork(
        spec, atom, out, memory.panels("out", views.q_rows(spec), spec.out_columns), place
    )


def _finishing(memory: Memory, row: Any, mods: Mods, lse, row_max, batches) -> CorrectionWork:
    o, stats, staged = _columns(memory, "o"), memory.stats, memory.staged
    return CorrectionWork(memory.spec, row, o, stats, mods, staged, lse, row_max, batches)


def _weighing(memory: Memory, row: Any, mods: Mods, scale, row_max, batches) -> SoftmaxWork:
    s, p, stats = _columns(memory, "s"), _columns(memory, "p"), memory.stats
    return SoftmaxWork(memory.spec, row, s, p, stats, mods, scale, row_max, batches)


def _issuing(memory: Memory) -> MmaWork:
    spec, products = memory.spec, Products(memory.spec)
    qk, pv = products.qk(), products.pv()
    s, p, o = (
        [_columns(memory, name)(t).toint() for t in range(spec.tiles)] for name in ("s", "p", "o")
    )
    return MmaWork(
        spec,
        Instruction(*products.qk_tile[:2], products.dtype, K_MAJOR, spec.ctas),
        Instruction(*products.pv_tile[:2], products.dtype, MN_MAJOR, spec.ctas),
        InShared(qk.make_fragment_A(memory.operand("q", products.q_layout))),
        InShared(qk.make_fragment_B(memory.operand("kv", products.k_layout))),
        InShared(pv.make_fragment_B(memory.operand("kv", products.v_layout))),
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
    """q, k, v, out: (batch, rows, heads, d), lse and row_max: (batch, heads, rows), packed tensors
    without a batch; items and runs: see `tables`. In pages, k and v: (pages, rows, heads, d)."""
    q, k, v, out = (batched(tensor, 4) for tensor in (q, k, v, out))
    lse, row_max = (batched(rows, 3) for rows in (lse, row_max))
    by_tma = cpasync.CopyBulkTensorTileG2SOp(group(spec))

    to_global = cpasync.CopyBulkTensorTileS2GOp()

    def atom(
        view: cute.Tensor, rows: tuple[int, ...], columns: int, height: int = TILE, by: Any = by_tma
    ) -> tuple:
        layout = views.swizzled(views.box(rows, columns, height), columns, view.element_type)
        return cpasync.make_tiled_tma_atom(by, view, layout, (*rows, columns))

    load_q, g_q = atom(views.queries(q, spec), views.q_rows(spec), spec.d)
    load_k, g_k = atom(keys(k), (spec.k_rows,), spec.d, spec.keys)
    load_v, g_v = atom(keys(v), (spec.key_rows,), spec.columns)
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
        smem=spec.smem_bytes, min_blocks_per_mp=1, stream=stream,
    )  # fmt: skip
