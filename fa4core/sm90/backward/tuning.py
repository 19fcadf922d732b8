"""Tile shapes of the Hopper backward, by head dim: data.

Of a thread's 240 registers the accumulators of dK and dV take (d + d_v) / 2 with a key tile of its
warpgroup's own, so from 129 on two warpgroups share one, each with half of the head dim; P then
goes through shared memory. That follows from what fits; the rest of what holds up to 128 was chosen
on an H200, in TFLOP/s of the whole backward pass (bf16, 32k tokens, hidden size 2048):

- Three tiles of Q instead of two: d=128 full 4k 515 (425), causal 4k 392 (350), window 1024 380
  (329); d=64 causal 8k 451 (384). With two, the next Q is asked for just before it is needed.
- dQ added by the threads themselves instead of a role behind shared memory, in one state of the
  order of instructions: d=128 full 4k 533 (461), causal 4k 503 (434), window 1024 410 (364), where
  the other way waited for its places; d=64 full 8k 456 (513), causal 444 (497), so not there.
- d=64, 128 queries instead of 64: full 8k 470 (384); a quarter of them early instead of half: 497
  (470); all: 381, because ptxas then makes products synchronous.

In the present order of instructions:

- dQ by the role instead of the threads: d=128 full 8k 555 (530), causal 8k 550 (529), window 1024
  416 (398); d=64 full 8k 498 (428).
- dS held in registers for dK, with 64 queries, at d=128: full 8k 598 (551), 1k 513 (491); causal 8k
  586 (535), 1k 376 (363); window 1024 448 (422). With 80, as FlashAttention-4 has, and so with dQ
  transposed: 594, 500, 567, 351, 421; not taken. At d=64 with 128: full 8k 538 (475), window 1024
  392 (363). A query then costs fewer passes through shared memory, which is what profiles say the
  kernel waits for.
- FlashAttention-4 beside the last ones: 622, 514, 589, 384, 464; d=64 542, 386.
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
        held: Whether dK takes dS from registers: less is read from shared memory.
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
    held: bool = False
    consumer: int = 240
    producer: int = 24


_WIDE = Shape(64, shared=True, stages_out=1, passes=2)

#: By the larger of the head dims, up to and including: with a score mod that has a derivative, for
#: which scores have to be there once more while P is still read, and without.
SHAPES: tuple[tuple[int, Shape, Shape], ...] = (
    (64, Shape(64, stages=3), Shape(128, stages=3, direct=False, held=True)),
    (128, Shape(64, stages=3), Shape(64, stages=3, direct=False, held=True)),
    (192, Shape(64, shared=True), Shape(64, shared=True)),
    (256, _WIDE, _WIDE),
)


def shape_of(head_dim: int, head_dim_v: int, differentiates: bool = False) -> Shape:
    """The shape for head dims."""
    d = max(head_dim, head_dim_v)
    derived, plain = next((a, b) for limit, a, b in SHAPES if d <= limit)
    return derived if differentiates else plain
