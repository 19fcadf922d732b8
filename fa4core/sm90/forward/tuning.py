"""Tile shapes of the Hopper forward, by head dim: data, with the measurement that chose them."""

from __future__ import annotations

import attrs


@attrs.frozen
class Shape:
    """How a forward kernel is cut.

    Attributes:
        groups: Consumer warpgroups, 64 queries each.
        keys: Keys of a block.
        stages: Blocks of K, and of V, in shared memory.
        consumer, producer: Registers of a thread.
        turns: Whether the consumers take turns at issuing products.
    """

    groups: int
    keys: int
    stages: int = 2
    consumer: int = 240
    producer: int = 24
    turns: bool = True


#: By the larger of the head dims, up to and including.
SHAPES: tuple[tuple[int, Shape], ...] = (
    (64, Shape(3, 112, consumer=160, producer=32, turns=False)),
    (96, Shape(2, 128)),
    (128, Shape(2, 128)),
    (192, Shape(2, 96)),
    (256, Shape(2, 80)),
)


def shape_of(head_dim: int, head_dim_v: int, rows: int) -> Shape:
    """The shape for head dims and the longest sequence's queries."""
    d = max(head_dim, head_dim_v)
    shape = next(shape for limit, shape in SHAPES if d <= limit)
    needed = max(1, -(-rows // 64))
    if needed >= shape.groups:
        return shape
    return attrs.evolve(shape, groups=needed, consumer=240, producer=24)
