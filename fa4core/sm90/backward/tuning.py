"""Tile shapes of the Hopper backward, by head dim: data.

Chosen by what fits into registers and shared memory; not measured yet. Of a thread's 240 registers
the accumulators of dK and dV take (d + d_v) / 2 with a key tile of its warpgroup's own, so from 129
on two warpgroups share one, each with half of the head dim; P then goes through shared memory.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Shape:
    """How a backward kernel is cut.

    Attributes:
        queries: Of a tile; 64, or 64 for each group.
        groups: Consumer warpgroups.
        shared: Whether the groups share one tile of 64 keys; else each has its own.
        stages: Tiles of Q in shared memory. S is begun a tile ahead, so with two the next Q would
            only be asked for when the tensor core has read the last one, just before it is needed.
        stages_out: Tiles of dO.
        passes: In how many steps dQ goes through shared memory, each with a part of the head dim.
        early: For how many of the queries dV is begun before dS is computed, when P is needed both
            rounded and not. With too few registers for that, ptxas makes products synchronous.
        direct: Whether consumers themselves add dQ to global memory, unless the order is fixed.
        consumer, producer: Registers of a thread.
    """

    queries: int
    groups: int = 2
    shared: bool = False
    stages: int = 2
    stages_out: int = 2
    passes: int = 1
    early: int = 64
    direct: bool = True
    consumer: int = 240
    producer: int = 24


_WIDE = Shape(64, shared=True, stages_out=1, passes=2)

#: By the larger of the head dims, up to and including: with a score mod that has a derivative, for
#: which scores have to be there once more while P is still read, and without.
SHAPES: tuple[tuple[int, Shape, Shape], ...] = (
    (64, Shape(64, stages=3), Shape(128, stages=3, early=32)),
    (128, Shape(64, stages=3), Shape(64, stages=3)),
    (192, Shape(64, shared=True), Shape(64, shared=True)),
    (256, _WIDE, _WIDE),
)


def shape_of(head_dim: int, head_dim_v: int, differentiates: bool = False) -> Shape:
    """The shape for head dims."""
    d = max(head_dim, head_dim_v)
    derived, plain = next((a, b) for limit, a, b in SHAPES if d <= limit)
    return derived if differentiates else plain
