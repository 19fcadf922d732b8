"""What a consumer warpgroup does: its products, its arithmetic, and what it leaves in memory.

The order is the role's, `consumer`. How a thread's elements lie is said in `fragments`.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

from fa4core.pipeline.device import meet
from fa4core.pipeline.effects import Fixed, drains, reads, touches, writes
from fa4core.plan.kinds import FULL
from fa4core.sm90.backward.products import Operands, Product, Products
from fa4core.sm90.backward.spec import ROWS, Spec
from fa4core.sm90.backward.tiles import Tiles
from fa4core.sm90.backward.weights import LOG2E, grad_values, weigh
from fa4core.sm90.fragments import (
    HALVES,
    clear,
    column,
    copy_words,
    first_column,
    half_of,
    moved,
    row_of,
)
from fa4core.sm90.memory import add_as_held, put, put_as_held, stored


class ConsumerWork(Fixed):
    """What a consumer warpgroup does.

    Attributes:
        products: Makes tiled MMAs; a fresh one for each product, because setting a field of one
            inside a loop would change it outside.
        operands: Fragments in shared memory.
        s, dp, sums_k, sums_v, sums_q: Accumulators in registers; s and dp become P and dS.
        weights: P as operand of the next product, if that is in registers.
        held: dS likewise.
        of_queries: LSE or delta of the thread's queries.
        shared: The warpgroup's other tiles in shared memory.
        group: The warpgroup's number.
        thread: 0..127 within it. `moved` where addresses follow from it that would be
            found ahead of loops and take registers that there are not.
        mods: Mask, score mod and their derivatives.
        scale: Run-time factor on q . k.
    """

    def __init__(
        self,
        spec: Spec,
        products: Products,
        operands: Operands,
        shared: Tiles,
        t,
        thread,
        mods,
        scale,
    ):
        self.spec, self.products, self.operands, self.shared = spec, products, operands, shared
        self.group, self.thread, self.mods, self.scale = t, thread, mods, scale
        self.tiles, self.passes = tuple(range(spec.tiles)), tuple(range(spec.shape.passes))
        self.differentiates, self.late = spec.differentiates, spec.late
        self.s, self.dp = products.scores.sums(), products.scores.sums()
        self.sums_k, self.sums_v = products.grad_k.sums(), products.grad_v.sums()
        self.sums_q = products.grad_q.sums()
        self.weights, self.held = products.weights(), products.held()
        self.of_queries = cute.make_rmem_tensor(
            (2, spec.queries // spec.parts // 8), cutlass.Float32
        )

    @touches(lambda t: (writes("sums_k", t), writes("sums_v", t)))
    def clear(self, t: Any) -> None:
        clear(self.sums_k)
        clear(self.sums_v)

    @touches(lambda t, stage: (reads("k"), reads("q", stage), writes("s", t)), unit="wgmma")
    def scores(self, t: Any, stage: Any) -> None:
        """S^T = K Q^T, begun."""
        self.s = self._fresh(self.products.scores, self.s)
        self.products.scores.begin(self.s, *self.operands.scores(stage), add=False)

    @touches(lambda t, stage: (reads("v"), reads("grad_out", stage), writes("dp", t)), unit="wgmma")
    def grad_weights(self, t: Any, stage: Any) -> None:
        """dP^T = V dO^T, begun."""
        self.dp = self._fresh(self.products.scores, self.dp)
        self.products.scores.begin(self.dp, *self.operands.grad_weights(stage), add=False)

    @touches(
        lambda t, p_stage, stage, in_smem, part: (
            reads("p", p_stage) if in_smem else reads(f"weights{part}", t),
            reads("grad_out", stage),
            writes("sums_v", t),
        ),
        unit="wgmma",
    )
    def add_v(self, t: Any, p_stage: Any, stage: Any, in_smem: bool, part: int) -> None:
        """dV += P^T dO for a part of the queries, begun."""
        p, out = self.operands.add_v(p_stage, stage)
        p = p if in_smem else self.weights
        self.products.grad_v.begin(self.sums_v, p, out, True, self.spec.steps(part))

    @touches(
        lambda t, stage, q_stage, held: (
            reads("held", t) if held else reads("grad_s", stage),
            reads("q", q_stage),
            writes("sums_k", t),
        ),
        unit="wgmma",
    )
    def add_k(self, t: Any, stage: Any, q_stage: Any, held: bool) -> None:
        """dK += dS^T Q, begun."""
        grad_s, q = self.operands.add_k(stage, q_stage)
        self.products.grad_k.begin(self.sums_k, self.held if held else grad_s, q, add=True)

    @touches(
        lambda t, stage, part: (reads("grad_s", stage), reads("k"), writes("sums_q", t)),
        unit="wgmma",
    )
    def grad_q(self, t: Any, stage: Any, part: int) -> None:
        """The warpgroup's part of dQ = dS K, begun."""
        self.sums_q = self._fresh(self.products.grad_q, self.sums_q)
        self.products.grad_q.begin(self.sums_q, *self.operands.grad_q(stage, part), add=False)

    def _fresh(self, product: Product, sums: cute.Tensor) -> cute.Tensor:
        return product.sums() if self.spec.held else sums

    @drains("wgmma")
    def settle(self, left: int) -> None:
        """Wait until at most `left` of the products begun are unfinished."""
        warpgroup.wait_group(left)

    def make_room(self, all_done: bool) -> None:
        """Wait for dK, which still reads dS, if S or, behind S, dP needs the registers of that; the
        protocol does not ask for it."""
        if all_done and self.spec.tight:
            self.settle(0)
        elif not all_done and not (self.spec.roomy or self.spec.tight):
            self.settle(1)

    @touches(lambda t, item, run, j, kind: (reads("s", t), writes("s", t)))
    def modify(self, t: Any, item: Any, run: Any, j: Any, kind: Any) -> None:
        """Apply the score mod, and on partial tiles the mask, to S."""
        _by_kind(self._modify, t, item, run, j, kind)

    def _modify(self, t: Any, item: Any, run: Any, j: Any, partial: bool) -> None:
        if self.mods.nothing_to_do(partial):
            return
        head, key, first = self._place(t, item, run, j)
        for half in HALVES:
            self.mods.apply(
                half_of(self.s, half),
                item,
                head,
                key + 8 * half,
                first,
                partial,
                self.scale,
                column,
            )

    @touches(lambda t, stage, ahead: (reads("lse", stage),))
    def recall_lse(self, t: Any, stage: Any, ahead: bool) -> None:
        """Into registers: ahead, because shared memory answers late when products read it, unless
        there are too few of them; where dS is held, they stay there until each is used."""
        self._recall(self.shared.lse(t, stage), ahead)

    @touches(lambda t, stage, ahead: (reads("delta", stage),))
    def recall_delta(self, t: Any, stage: Any, ahead: bool) -> None:
        """Likewise."""
        self._recall(self.shared.delta(t, stage), ahead)

    def _recall(self, rows: cute.Tensor, ahead: bool) -> None:
        if self.spec.held:
            self.of_queries = rows
        elif ahead == self.spec.ahead:
            cute.autovec_copy(rows, self.of_queries)

    @touches(lambda t: (reads("s", t), writes("s", t)))
    def weigh(self, t: Any) -> None:
        """S -> P."""
        factor = self.scale * LOG2E if self.mods.plain else cutlass.Float32(LOG2E)
        weigh(self.spec, self.s, self.of_queries, factor)

    @touches(
        lambda t, stage, in_smem, part: (
            reads("s", t),
            writes(f"p{t}", stage) if in_smem else writes(f"weights{part}", t),
        )
    )
    def pass_on(self, t: Any, stage: Any, in_smem: bool, part: int) -> None:
        """P of a part of the queries, rounded, to where the next product reads it."""
        if in_smem:
            product = self.products.scores.product()
            put(self.s, product, self.thread, self.shared.weights(t, stage))
            return
        steps = self.spec.steps(part)
        s, weights = (_elements(x, 8 * steps.start, 8 * len(steps)) for x in (self.s, self.weights))
        rounded = cute.make_rmem_tensor(s.layout, weights.element_type)
        rounded.store(s.load().to(weights.element_type))
        copy_words(rounded, weights, moved)

    @touches(lambda t: (reads("s", t), reads("dp", t), writes("dp", t)))
    def grad_values(self, t: Any) -> None:
        """dP -> P (dP - delta), the gradient of what the score mod gives."""
        grad_values(self.dp, self.s, self.of_queries)

    @touches(lambda t, item, run, j, kind: (reads("s", t), reads("dp", t), writes("dp", t)))
    def differentiate(self, t: Any, item: Any, run: Any, j: Any, kind: Any) -> None:
        """From the gradient of the score mod's values to dS, and to captured tensors."""
        _by_kind(self._differentiate, t, item, run, j, kind)

    def _differentiate(self, t: Any, item: Any, run: Any, j: Any, partial: bool) -> None:
        head, key, first = self._place(t, item, run, j)
        for half in HALVES:
            self.mods.differentiate(
                half_of(self.s, half), half_of(self.dp, half), item, head, key + 8 * half, first,
                partial, self.scale, column,
            )  # fmt: skip

    def _place(self, t: Any, item: Any, run: Any, j: Any) -> tuple[Any, Any, Any]:
        """Head, first key of the thread, and first query."""
        spec, thread = self.spec, moved(self.thread)
        key = (item.tile * spec.tiles + spec.tile_of(t)) * ROWS + row_of(thread)
        first = (j * spec.parts + spec.part_of(t)) * (spec.queries // spec.parts)
        return item.h + run.head, key, first + first_column(thread)

    @touches(
        lambda t, stage, held: (
            reads("dp", t),
            writes(f"grad_s{t}", stage),
            *((writes("held", t),) if held else ()),
        )
    )
    def share(self, t: Any, stage: Any, held: bool) -> None:
        """dS, rounded, into shared memory, and into registers where dK takes it from there."""
        product = self.products.scores.product()
        place = self.shared.grad_s(t, stage)
        rounded = put(self.dp, product, moved(self.thread), place)
        if held:
            copy_words(rounded, self.held, moved)

    @touches(
        lambda t, item, head, j, part, staged: (
            reads("sums_q", t),
            *((writes("grad_q", t),) if staged else ()),
        )
    )
    def hand_over(self, t: Any, item: Any, head: Any, j: Any, part: int, staged: bool) -> None:
        """A part of dQ of a query tile into shared memory, for the reduce role, or added to that in
        global memory."""
        if staged:
            put_as_held(self.sums_q, moved(self.thread), self.shared.grad_q(t))
        else:
            place = self.shared.sums_of(t, item, head, j, part)
            add_as_held(self.sums_q, moved(self.thread), place)

    def show(self) -> None:
        """What was handed over becomes visible to TMA: late, when it has arrived."""
        if self.spec.staged:
            cute.arch.fence_proxy("async.shared", space="cta")

    @touches(lambda t: (reads("sums_k", t), writes("grad_k", t)))
    def finish_k(self, t: Any) -> None:
        """dK, rounded, into shared memory."""
        for i in range(cute.size(self.sums_k)):
            self.sums_k[i] = self.sums_k[i] * self.scale
        self._finish(t, "k", self.sums_k, self.products.grad_k)

    @touches(lambda t: (reads("sums_v", t), writes("grad_v", t)))
    def finish_v(self, t: Any) -> None:
        """dV likewise."""
        self._finish(t, "v", self.sums_v, self.products.grad_v)

    def _finish(self, t: Any, name: str, sums: cute.Tensor, product: Product) -> None:
        put(sums, product.product(), moved(self.thread), self.shared.results[name].tile(t))

    @touches(lambda t, item, name: (reads(f"grad_{name}", t),), unit="store")
    def store(self, t: Any, item: Any, name: str) -> None:
        """dK or dV from shared to global memory, begun."""
        meet(self.spec.pipeline, "consumer", t)
        self.shared.results[name].store(t, item, self.thread)

    @drains("store")
    def stored(self, left: int) -> None:
        """Wait until TMA has read dK and dV."""
        stored(self.thread)
        meet(self.spec.pipeline, "consumer", self.group)


def _elements(fragment: cute.Tensor, first: int, count: int) -> cute.Tensor:
    """Some of a thread's registers, in their order."""
    return cute.make_tensor(fragment.iterator + first, cute.make_layout(count))


@cute.jit
def _by_kind(change: cutlass.Constexpr, t: Any, item: Any, run: Any, j: Any, kind: Any):
    """Code of its own for FULL tiles, and for others."""
    if kind == FULL:
        change(t, item, run, j, False)
    else:
        change(t, item, run, j, True)
