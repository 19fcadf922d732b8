"""The plan of one call: variant + problem + target -> tiles, numerics, schedule, compile key.

Everything that backends must agree on is decided here, on the host, before anything is compiled.
`explain` prints it; the cost estimates are made from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import attrs
import numpy as np

from fa4core.plan import makespan, roofline
from fa4core.plan.choose import choose
from fa4core.plan.groups import any_of_group
from fa4core.plan.makespan import Estimate, Workload, WorkTiles
from fa4core.plan.pairs import backward_ctas
from fa4core.plan.problem import Problem
from fa4core.plan.roofline import Terms, Work, work_of
from fa4core.plan.target import SM100, Target, TileShape, target
from fa4core.plan.tiles import FULL, PARTIAL, TileMap, tile_map
from fa4core.variant import Variant
from primitives.exp import Exp
from primitives.expr import Node
from primitives.schedule import Schedule

FLOP_TILE = 128  # queries and keys of the tiles by which attended scores are counted


@attrs.frozen(eq=False, slots=False)
class Plan:
    """What one attention call does.

    Attributes:
        variant: What is computed.
        problem: Sizes.
        target: What for.
        stride_classes: Of q, k and v (see `strides`), as far as the tensors are known.
    """

    variant: Variant
    problem: Problem
    target: Target = SM100
    stride_classes: tuple[str, ...] = ()

    # --------------------------------------------------------------------------- decisions

    @cached_property
    def forward_tile(self) -> TileShape:
        """Tile of the forward pass; two query tiles side by side only if there are two."""
        shape = self.target.forward_tile(self.problem.head_dim, self.problem.head_dim_v)
        if max(self.problem.seqlens_q, default=0) <= shape.q * self._ctas:
            return attrs.evolve(shape, stages=1, ctas=self._ctas)
        return attrs.evolve(shape, ctas=self._ctas)

    @property
    def _ctas(self) -> int:
        """That share a work tile."""
        return 1 if self.variant.schedule is None else self.variant.schedule.ctas

    @cached_property
    def backward_tile(self) -> TileShape:
        """Tile of the backward pass."""
        head_dims, graph = (self.problem.head_dim, self.problem.head_dim_v), self.variant.graph
        ctas = self._ctas
        if self.variant.schedule is None:
            ctas = backward_ctas(self.target.name, graph.mask, graph.score, head_dims)
        return attrs.evolve(self.target.backward_tile(*head_dims), ctas=ctas)

    @property
    def exp(self) -> Exp:
        """How exponentials are computed: the variant's choice, or the target's."""
        p = self.problem
        return self.variant.exp or self.target.exp(
            max(p.head_dim, p.head_dim_v), roofline.needs_mufu(self.variant.graph.score)
        )

    @property
    def rescale_threshold(self) -> float:
        """The variant's choice, or the target's (log2 domain)."""
        threshold = self.variant.rescale_threshold
        return self.target.rescale_threshold if threshold is None else float(threshold)

    @cached_property
    def schedule(self) -> Schedule:
        """The variant's choice, or what `choose` says; the default without a model."""
        if self.variant.schedule is not None:
            return self.variant.schedule
        if self.target.rates is None:
            return Schedule()
        return choose(self.problem, self.tiles, self.target)

    @cached_property
    def tiles(self) -> TileMap:
        """Kind of every tile of the forward pass."""
        return self._map(self.variant.graph.mask, self.forward_tile.q, self.forward_tile.k)

    @cached_property
    def key(self) -> str:
        """What a kernel is compiled for, as text.

        No tensor or scalar value is in it, and of the lengths only whether there are queries for
        two tiles side by side.
        """
        p = self.problem
        packing = f"packed_q={p.starts_q is not None} packed_k={p.starts_k is not None}"
        return "\n".join(
            (
                self.variant.key,
                f"{str(p.dtype).removeprefix('torch.')} d={p.head_dim} d_v={p.head_dim_v}",
                f"{packing} page_size={p.page_size}",
                f"group={'1' if p.group == 1 else 'many'} strides={self.stride_classes}",
                f"{self.target.arch or self.target.name} {self.forward_tile} {self.backward_tile}",
                f"{self.exp} rescale={self.rescale_threshold}",
                f"schedule={self.variant.schedule or 'chosen'}",
            )
        )

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits of the key."""
        return hashlib.blake2b(self.key.encode(), digest_size=8).hexdigest()

    # -------------------------------------------------------------------------------- cost

    def roofline(self, kind: int = FULL, *, backward: bool = False) -> Terms:
        """Cycles of a CTA for one block of the given kind (FULL or PARTIAL)."""
        p, shape = self.problem, self.backward_tile if backward else self.forward_tile
        work = self._mod_work(backward)
        if kind == PARTIAL:
            work += work_of(self.variant.graph.mask) + Work(alu=1)  # and the select
        if backward:
            # The policy is the forward pass's, where exponentials bind, unless it is asked for.
            exp = self.variant.exp or Exp()
            return roofline.backward(
                self.target, shape.q, shape.k, p.head_dim, p.head_dim_v,
                ctas=shape.ctas, exp=exp, work=work,
            )  # fmt: skip
        return roofline.forward(
            self.target, shape.q * shape.stages, shape.k, p.head_dim, p.head_dim_v,
            ctas=shape.ctas, exp=self.exp, work=work,
        )  # fmt: skip

    def estimates(self, *, backward: bool = False) -> list[Estimate]:
        """Modelled time with every schedule that applies, in the order of `candidates`.

        Raises:
            ValueError: The target has no cost model.
        """
        self.target.measured  # noqa: B018 (raises)
        return list(self._backward_estimates if backward else self._forward_estimates)

    @cached_property
    def _orders_differ(self) -> bool:
        """Whether sequences differ, so that sorting them is a choice."""
        p = self.problem
        lengths = set(zip(p.seqlens_q, p.seqlens_k, strict=True))
        return len(lengths) > 1 or (p.batch > 1 and "b" in self.variant.graph.mask.free)

    @cached_property
    def _forward_estimates(self) -> list[Estimate]:
        workload = self._workload(backward=False)
        tiles = {"heads": self._work_tiles(packed=False)}
        if self.problem.group > 1:
            tiles["packed_gqa"] = self._work_tiles(packed=True)
        tiles["split_kv"] = tiles["heads"]
        splits = makespan.useful_splits(tiles["heads"], workload.machines)
        chosen = self.schedule
        schedules = makespan.candidates(
            self.problem.group > 1, self._orders_differ, splits, chosen.l2_sections, chosen.ctas
        )
        if chosen not in schedules and chosen.coordinates in tiles:
            schedules.append(chosen)
        return [makespan.simulate(tiles[s.coordinates], s, workload) for s in schedules]

    @cached_property
    def _backward_estimates(self) -> list[Estimate]:
        workload = self._workload(backward=True)
        shape, p = self.backward_tile, self.problem
        across = self._map(self.variant.graph.mask, shape.q, shape.k * shape.ctas).transpose()
        costs = self._block_cycles(backward=True)
        tiles = _work_tiles(across, p.heads_q, costs, p.group)
        schedules = makespan.candidates(False, self._orders_differ)
        return [makespan.simulate(tiles, s, workload) for s in schedules]

    def work_tiles(self, queries: int, keys: int, packed: int = 1) -> WorkTiles:
        """Work tiles of `queries` queries of `packed` heads, with the blocks of `keys` that each
        visits."""
        p, mask = self.problem, any_of_group(self.variant.graph.mask, packed)
        heads = p.heads_q // packed
        across = self._map(mask, queries, keys, heads=heads)
        return _work_tiles(across, heads, (1.0, 1.0), p.group // packed)

    def key_tiles(self, keys: int, queries: int) -> WorkTiles:
        """Work tiles of the backward pass: `keys` keys of a query head, with the blocks of
        `queries` that each visits."""
        across = self._map(self.variant.graph.mask, queries, keys).transpose()
        return _work_tiles(across, self.problem.heads_q, (1.0, 1.0), self.problem.group)

    def _work_tiles(self, packed: bool) -> WorkTiles:
        p, shape = self.problem, self.forward_tile
        rows = shape.q * shape.stages * shape.ctas
        costs = self._block_cycles(backward=False)
        if not packed:
            across = self._map(self.variant.graph.mask, rows, shape.k)
            return _work_tiles(across, p.heads_q, costs, p.group)
        mask = any_of_group(self.variant.graph.mask, p.group)
        across = self._map(mask, max(1, rows // p.group), shape.k, heads=p.heads_kv)
        return _work_tiles(across, p.heads_kv, costs)

    def _block_cycles(self, backward: bool) -> tuple[float, float]:
        """Cycles of a partial and of a full block, at the pipeline's efficiency."""
        efficiency = self._cost(backward).efficiency
        partial, full = (self.roofline(k, backward=backward).cycles for k in (PARTIAL, FULL))
        return partial / efficiency, full / efficiency

    def _cost(self, backward: bool) -> makespan.Cost:
        if backward:
            return self.target.backward_cost[self.backward_tile.ctas]
        return self.target.cost(max(self.problem.head_dim, self.problem.head_dim_v))

    def _mod_work(self, backward: bool) -> Work:
        score = self.variant.graph.score
        if not backward:
            return work_of(score)
        rule, _ = self.variant.gradient
        return work_of(score, rule.score, *(d for _, _, d in rule.captured))

    def _workload(self, backward: bool) -> Workload:
        p, rates = self.problem, self.target.measured
        size = p.dtype.itemsize
        per_score = 2 * (p.head_dim + p.head_dim_v)
        queries = sum(p.seqlens_q) * p.heads_q
        keys = self._keys_read * size * (p.head_dim + p.head_dim_v)
        moved = queries * (p.head_dim + p.head_dim_v) * size + keys
        passes = 3 if backward else 1  # read again, with gradients read or written beside them
        ctas = self.backward_tile.ctas if backward else self.forward_tile.ctas
        return Workload(
            rates=rates,
            cost=self._cost(backward),
            machines=rates.sms // ctas,
            flop=self.attended * per_score * (2.5 if backward else 1),
            bytes_moved=moved * passes,
            deals=self.target.deals or backward,
            combine_bytes=2 * queries * (p.head_dim_v + 1) * 4,
            kv_heads_in_section=makespan.kv_heads_in_section(
                rates.l2_bytes, np.asarray(p.seqlens_k) * ((p.head_dim + p.head_dim_v) * size)
            ),
        )

    @cached_property
    def attended(self) -> float:
        """Scores of the attended pairs; those of partial tiles count half. The tiles are the same
        for all targets, so that FLOP are."""
        p = self.problem
        tiles = self._map(self.variant.graph.mask, FLOP_TILE, FLOP_TILE)
        full, partial = (tiles.lengths(k) * tiles.tile_k for k in (FULL, PARTIAL))
        lengths_q = np.repeat(p.seqlens_q, [tiles.tiles_q(b) * p.heads_q for b in range(p.batch)])
        lengths_k = np.repeat(p.seqlens_k, [tiles.tiles_q(b) * p.heads_q for b in range(p.batch)])
        index = _indices(tiles, p.heads_q)[2]
        rows = np.minimum(tiles.tile_q, lengths_q - index * tiles.tile_q)
        return float((rows * np.minimum(full + partial / 2, lengths_k)).sum())

    @cached_property
    def _keys_read(self) -> int:
        """Keys, over all KV heads, that any query of their group attends to."""
        p = self.problem
        mask = any_of_group(self.variant.graph.mask, p.group)
        shape = self.forward_tile
        across = self._map(mask, shape.q, shape.k, heads=p.heads_kv).transpose()
        lengths = np.repeat(p.seqlens_k, [across.tiles_q(b) * p.heads_kv for b in range(p.batch)])
        index = _indices(across, p.heads_kv)[2]
        keys = np.minimum(across.tile_q, lengths - index * across.tile_q)
        return int(keys[across.lengths() > 0].sum())

    @cached_property
    def _maps(self) -> dict[tuple, TileMap]:
        return {}

    def _map(self, mask: Node, tile_q: int, tile_k: int, heads: int | None = None) -> TileMap:
        """The tile map of a mask, made once for each tile size and number of heads."""
        p = self.problem
        heads = p.heads_q if heads is None else heads
        known = (mask, tile_q, tile_k, heads)
        if known not in self._maps:
            self._maps[known] = tile_map(
                mask,
                batch=p.batch,
                heads=heads,
                seqlens_q=p.seqlens_q,
                seqlens_k=p.seqlens_k,
                tile_q=tile_q,
                tile_k=tile_k,
            )
        return self._maps[known]


def plan(
    variant: Variant,
    problem: Problem,
    on: str | Target = SM100,
    stride_classes: Sequence[str] = (),
) -> Plan:
    """The plan of a call.

    Args:
        variant: What is computed.
        problem: Sizes.
        on: The target, or its name.
        stride_classes: Of q, k and v, where the tensors are known.
    """
    return Plan(variant, problem, target(on), tuple(stride_classes))


def _indices(tiles: TileMap, heads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sequence, head and index of every work tile in the order of `TileMap.lengths`."""
    rows = [tiles.tiles_q(b) for b in range(tiles.batch)]
    sequence = np.repeat(np.arange(tiles.batch), [n * heads for n in rows])
    head = [np.repeat(np.arange(heads), n) for n in rows]
    index = [np.tile(np.arange(n), heads) for n in rows]
    empty = [np.zeros(0, dtype=np.int64)]
    return sequence, np.concatenate(empty + head), np.concatenate(empty + index)


def _work_tiles(
    tiles: TileMap, heads: int, cycles: tuple[float, float], group: int = 1
) -> WorkTiles:
    partial, full = tiles.lengths(PARTIAL), tiles.lengths(FULL)
    cost = partial * cycles[0] + full * cycles[1]
    return WorkTiles(*_indices(tiles, heads), partial + full, cost, group)
