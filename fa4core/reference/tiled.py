"""The tiled reference, forward: FlashAttention-4's algorithm, interpreted on the plan with torch.

It skips what the tile map calls empty, evaluates the mask on partial tiles only, and does the
online softmax with the same policies as the kernels (lazy rescaling, exp2 by polynomial, P rounded
to the input's dtype, split keys). Memory is proportional to the inputs. `fa4core.ops` calls it;
`fa4core.reference.backward` is its other half.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import attrs
import torch

from fa4core.lowering.torch import evaluate
from fa4core.plan.problem import Problem
from fa4core.program import Program
from fa4core.reference.softmax import NEVER, OnlineSoftmax, combine, join_sink
from fa4core.reference.storage import storages
from fa4core.reference.work import TileRows, Work, all_queries, indices, scores, work
from primitives.exp import Exp, hardware
from primitives.sequence import Layout

Tensor = torch.Tensor

#: The rescale threshold where a variant names none: log2(256), as in FlashAttention-4.
DEFAULT_THRESHOLD = 8.0


@attrs.frozen(eq=False)
class Call:
    """One attention call, validated, with everything both passes need.

    Attributes:
        program: What to compute, captured tensors bound.
        problem: Sizes.
        analyse: Makes the tile map of the program's mask; kernels of packed heads want another one.
        layout: Where the sequences lie.
        scale: Factor on q . k.
        tile_q: Queries in a tile.
        tile_k: Keys in a tile.
    """

    program: Program
    problem: Problem
    analyse: Callable[[], TileRows]
    layout: Layout | None
    scale: float
    tile_q: int = 128
    tile_k: int = 128

    @cached_property
    def tiles(self) -> TileRows:
        """The tile map of the program's mask."""
        return self.analyse()

    @property
    def exp(self) -> Exp:
        return self.program.exp or hardware()

    @property
    def threshold(self) -> float:
        given = self.program.rescale_threshold
        return DEFAULT_THRESHOLD if given is None else float(given)

    @property
    def splits(self) -> int:
        return 1 if self.program.schedule is None else self.program.schedule.num_splits

    @property
    def accumulator(self) -> torch.dtype:
        """What scores, statistics and sums are held in; also the dtype of the saved log-sum-exp.

        float32 for the half types, as in the kernels. float64 for float32 inputs, which no kernel
        takes: a backward pass that recomputes P in float32 has up to 3.2 times the error of plain
        float32 attention, which keeps P (measured over head dims 8..256 and lengths 1..1000).
        """
        return torch.float32 if self.problem.dtype.itemsize == 2 else torch.float64


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and row maximum.

    Args:
        call: The call.
        q: (batch, seqlen_q, heads_q, d) or packed (total_q, heads_q, d).
        k: As the layout says, with heads_kv.
        v: As k, with d_v.

    Returns:
        The output as q with d_v, in q's dtype; LSE and row maximum (batch, heads_q, seqlen_q) or
        (heads_q, total_q), natural units, in the accumulator's dtype.
    """
    of_q, of_k = storages(call.problem, call.layout, q.device)
    real, dtype = call.accumulator, call.problem.dtype
    out = q.new_zeros((*q.shape[:-1], call.problem.head_dim_v))
    lse = q.new_full((*q.shape[:-1], 1), NEVER, dtype=real)  # (..., seqlen_q, heads_q, 1) inside
    row_max = lse.clone()
    if call.program.graph.has_sink:  # what rows with nothing to attend to are left with
        for item in all_queries(call.problem, q.device):
            of_q.write(lse, item.b, item.h, item.rows, sink(call, item)[..., None])
    items = work(
        call.tiles, call.program.graph.mask, call.problem, call.tile_q, call.tile_k, q.device
    )
    for item in items:
        queries = of_q.read(q, item.b, item.h, item.rows).to(real)
        kv_head = item.h // call.problem.group
        parts = []
        for share in item.shares(call.splits):
            state = OnlineSoftmax.start(
                (*queries.shape[:2], call.problem.head_dim_v),
                queries,
                call.exp,
                call.threshold,
                dtype,
            )
            for block in share:
                keys = of_k.read(k, item.b, kv_head, block.columns).to(real)
                values = of_k.read(v, item.b, kv_head, block.columns).to(real)
                variables = indices(item, item.rows, block.columns)
                s = scores(queries, keys, call.program, variables, call.scale, block.masked)
                state.update(s.values, values, block.columns)
            parts.append(state.finish())
        result = combine(parts)
        if call.program.graph.has_sink:
            result = join_sink(result, sink(call, item))
        of_q.write(out, item.b, item.h, item.rows, result.out)
        of_q.write(lse, item.b, item.h, item.rows, result.lse[..., None])
        of_q.write(row_max, item.b, item.h, item.rows, result.row_max[..., None])
    return out, _by_head(lse), _by_head(row_max)


def _by_head(rows: Tensor) -> Tensor:
    """(..., seqlen, heads, 1) -> (..., heads, seqlen)."""
    return rows.squeeze(-1).transpose(-1, -2).clone(memory_format=torch.contiguous_format)


def sink(call: Call, item: Work) -> Tensor:
    """Sink logits (n, rows) of a work tile."""
    variables = indices(item, item.rows, item.rows[:1])
    (logits,) = evaluate([call.program.graph.sink], variables, dtype=call.accumulator)
    return logits.expand(len(item.b), len(item.rows), 1).squeeze(-1)
