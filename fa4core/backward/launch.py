"""The kernels of a backward pass: what they are compiled for, and what they take.

A target says which main kernel a call needs (`Skeleton`); the plan, the kernels before and after,
and all arguments follow from its spec. It imports no DSL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from fa4core.backward.rows import Rows
from fa4core.backward.rule import Rule
from fa4core.backward.spec import BackwardSpec, RowSpec
from fa4core.backward.tables import tables
from fa4core.backward.work import Item
from fa4core.compile.kernel import Kernel, TensorType, type_of
from fa4core.forward.arguments import captured, compiled_for_either
from fa4core.forward.lists import dealt, listed
from fa4core.places import Place
from fa4core.plan.makespan import evened
from fa4core.plan.target import target as planned
from fa4core.plan.tiles import tile_map
from fa4core.reference.tiled import Call
from primitives.exp import Exp
from primitives.expr import Capture
from primitives.schedule import Schedule, Source

Tensor = torch.Tensor
#: Query blocks that a work tile costs besides its own, roughly.
TILE = 1


@attrs.frozen
class Skeleton:
    """A target's backward kernels.

    Attributes:
        spec_of: (call, target's name, deterministic) -> what the main kernel is compiled for.
        function: Its host function, "module:name".
    """

    spec_of: Callable[[Call, str, bool], BackwardSpec]
    function: str


@attrs.frozen(eq=False)
class Launches:
    """The kernels of a call and their arguments that don't change.

    Attributes:
        spec: Of the main kernel.
        kernels: Before, main (one for each of `BackwardSpec.launches`), after.
        table: `Rows.table`.
        heads: Query heads.
        rows: Padded rows of each.
        rest: Arguments of the main kernel: the plan and captured tensors.
        ctas: Of the main kernel.
        receivers: Captured tensors with a gradient, in the main kernel's order.
    """

    spec: BackwardSpec
    kernels: tuple[Kernel, ...]
    table: Tensor
    heads: int
    rows: int
    rest: tuple[Any, ...]
    ctas: int
    receivers: tuple[Capture, ...]


def common(call: Call, target: str, deterministic: bool) -> dict[str, Any]:
    """What every target's spec says of a call."""
    return compiled_for_either(call, target) | {
        "graph": Rule.of(call.program).dump(),
        "exp": call.program.exp or Exp(),  # products bind, not exponentials
        "deterministic": deterministic,
    }


def schedule_of(call: Call) -> Schedule:
    """The variant's order and work source, or the default. What a tile stands for is the forward
    pass's choice, and lists take the place of a queue."""
    given = call.program.schedule
    if given is None:
        return Schedule()
    source: Source = "one_tile" if given.source == "one_tile" else "persistent"
    return Schedule(
        source=source, order=given.order, l2_sections=given.l2_sections, ctas=given.ctas
    )


def launches(
    skeleton: Skeleton, call: Call, place: Place, deterministic: bool, grad_lse: bool
) -> Launches | None:
    """The kernels of a call, or None if there is no work.

    Args:
        skeleton: The target's.
        call: Validated and supported.
        place: Where it will run.
        deterministic: Whether dQ is the same bit by bit in every run.
        grad_lse: Whether the LSE has a gradient.
    """
    problem, rule = call.problem, Rule.of(call.program)
    spec = skeleton.spec_of(call, place.target, deterministic)
    rows = Rows(problem, spec.queries)
    if not rows.count or not problem.heads_q:
        return None
    items, runs = tables(
        problem,
        _tile_map(call, spec),
        spec.side,
        schedule_of(call),
        deterministic,
        planned(place.target),
    )
    if not len(items):
        return None
    persistent = schedule_of(call).source == "persistent"
    clusters = min(max(1, place.sms // spec.ctas), len(items)) if persistent else len(items)
    if not spec.listed and not deterministic:  # whose order is that of turns
        items = _evened(items, clusters)
    plan: tuple[Tensor, ...] = (items, runs)
    if spec.listed:
        order, lists = listed(dealt(items, clusters))
        plan = (items[order], runs, lists)
    constants = captured(rule.captures)
    return Launches(
        spec,
        _kernels(skeleton, call, place, spec, rule, constants, grad_lse),
        rows.table(),
        problem.heads_q,
        rows.count,
        (*plan, constants),
        clusters * spec.ctas,
        rule.receivers,
    )


def _evened(items: Tensor, clusters: int) -> Tensor:
    """Items in an order that gives each of the clusters, which take every n-th, as much to do."""
    blocks = items[:, [f.name for f in attrs.fields(Item)].index("blocks")]
    return items[torch.from_numpy(evened(blocks.numpy() + TILE, clusters))].contiguous()


def _tile_map(call: Call, spec: BackwardSpec) -> Any:
    problem = call.problem
    return tile_map(
        call.program.graph.mask,
        batch=problem.batch,
        heads=problem.heads_q,
        seqlens_q=problem.seqlens_q,
        seqlens_k=problem.seqlens_k,
        tile_q=spec.queries,
        tile_k=spec.keys,
    )


def _kernels(
    skeleton: Skeleton,
    call: Call,
    place: Place,
    spec: BackwardSpec,
    rule: Rule,
    constants: tuple[Tensor, ...],
    grad_lse: bool,
) -> tuple[Kernel, ...]:
    problem = call.problem
    of_q, of_k = (4 if starts is None else 3 for starts in (problem.starts_q, problem.starts_k))
    q, k = (TensorType(spec.dtype, rank) for rank in (of_q, of_k))
    row, sums = (TensorType("float32", n) for n in (2, 3))
    lse = TensorType("float32", of_q - 1, align=4)  # a gradient may begin anywhere
    table = TensorType("int32", 2)
    ranks = (max(1, c.rank) for c in rule.receivers)
    if spec.deterministic:
        sums_of_captured = tuple(TensorType("int64", rank + 1, align=8) for rank in ranks)
    else:
        sums_of_captured = tuple(TensorType("float32", rank, align=4) for rank in ranks)
    before = (q, q, lse, lse, table, row, row, sums, table)
    rest = type_of(constants), sums_of_captured, "float32", "int32"
    plan = (table, table, TensorType("int32", 1)) if spec.listed else (table, table)
    main = (q, k, k, q, k, k, row, row, sums, table, *plan, *rest)
    after = (sums, table, q, "float32")
    of_out = RowSpec(spec.queries, spec.head_dim_v, spec.d, grad_lse)
    of_queries = RowSpec(spec.queries, spec.head_dim, spec.d, part=spec.sums_part)
    where = place.target, place.emulated
    return (
        Kernel("fa4core.backward.pre:prepare_rows", before, of_out, *where),
        *(Kernel(skeleton.function, main, launched, *where) for launched in spec.launches),
        Kernel("fa4core.backward.post:finish_rows", after, of_queries, *where),
    )
