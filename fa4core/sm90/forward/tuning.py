"""Tile shapes of the Hopper forward, by head dim: data, with the measurement that chose them.

Measured on one H200 by `benchmarks/tune_sm90.py`: bf16, 32,768 tokens in sequences of 8,192, hidden
size 2,048, candidates and FlashAttention-4 interleaved; TFLOP/s, medians, run-to-run spread 1 to
3 %.

| d | shape | causal | full | window 1024 |
|---|---|---|---|---|
| 128 | 2 x 64 rows, 112 keys | 591 | 691 | |
| 128 | 2 x 64 rows, 128 keys | 639 | 708 | 500 |
| 128 | 2 x 64 rows, 144 keys | 609 | 708 | 410 |
| 128 | 2 x 64 rows, 144 keys, no turns | 634 | 722 | 424 |
| 128 | FlashAttention-4 beside them | 597 | 658 | 493 |
| 64 | 2 x 64 rows, 128 keys | 450 | 463 | |
| 64 | 3 x 64 rows, 96 keys | 497 | 533 | 345 |
| 64 | 3 x 64 rows, 96 keys, no turns | 491 | 539 | 351 |
| 64 | 3 x 64 rows, 112 keys, no turns | 495 | 556 | 327 |
| 64 | 3 x 64 rows, 128 keys | 450 | 535 | 297 |
| 64 | FlashAttention-4 beside them | 510 | 541 | 353 |

With lists of work tiles dealt by their time, in another run, causal at 1k, 4k, 8k and 32k (window
1024 at 4k and 8k):

| d | shape | 1k | 4k | 8k | 32k | window 4k | 8k |
|---|---|---|---|---|---|---|---|
| 128 | 2 x 64 rows, 128 keys | 501 | 619 | 648 | 684 | 498 | 494 |
| 128 | 2 x 64 rows, 128 keys, no turns | 501 | 622 | 652 | 691 | 506 | 505 |
| 128 | as the first, every n-th tile to each CTA | 448 | 577 | 618 | 654 | | |
| 128 | as the first, one tile for each CTA | 381 | 563 | 620 | 684 | 432 | 442 |
| 128 | 2 x 64 rows, 64 keys, four stages | | | | | 469 | 472 |
| 128 | 2 x 64 rows, 112 keys | | | | | 432 | 435 |
| 128 | FlashAttention-4 behind them | 393 | 539 | 577 | 616 | 456 | 467 |
| 64 | 3 x 64 rows, 96 keys, no turns | | | 504 | | | |
| 64 | 3 x 64 rows, 96 keys, no turns, three stages | | | 513 | | | |
| 64 | 3 x 64 rows, 112 keys, no turns | | | 503 | | | |
| 64 | FlashAttention-4 behind them | | | 488 | | | |

With key blocks from the last to the first, in a third run, at 8k:

| d | shape | causal | ALiBi | softcap | window 1024 | window 128 |
|---|---|---|---|---|---|---|
| 128 | 2 x 64 rows, 128 keys, no turns | 756 | 681 | 563 | 572 | 203 |
| 128 | 2 x 64 rows, 128 keys | 750 | 667 | 551 | 575 | 205 |
| 128 | FlashAttention-4 behind them | 692 | | 302 | 504 | 155 |
| 64 | 3 x 64 rows, 96 keys, no turns, three stages | 546 | 468 | 319 | 388 | 104 |
| 64 | 3 x 64 rows, 96 keys, no turns | 538 | 471 | 333 | 387 | 106 |
| 64 | 2 x 64 rows, 128 keys, no turns, three stages | 471 | 383 | 323 | 352 | 132 |
| 64 | as the first, an eighth of exp2 and tanh by polynomial | 520 | 449 | 325 | 382 | 103 |
| 64 | FlashAttention-4 behind them | 525 | | 192 | 365 | 99 |

Full at 1k, 4k and 8k in a fourth run, causal and the window at 8k beside it; 3 x 64 rows, no turns,
three stages of 80 to 128 keys, four of 64:

| d | keys | full 1k | 4k | 8k | causal | window 1024 |
|---|---|---|---|---|---|---|
| 64 | 64 | 416 | 477 | 493 | 477 | 362 |
| 64 | 80 | 434 | 508 | 529 | 497 | 346 |
| 64 | 96 | 443 | 521 | 540 | 528 | 380 |
| 64 | 112 | 420 | 532 | 543 | 505 | 340 |
| 64 | 128 | 433 | 521 | 537 | 505 | 347 |
| 64 | FlashAttention-4 beside them | 407 | 511 | 539 | 498 | 357 |

Also measured and not taken: to begin the next work tile's scores before the rows of this one are
finished (causal at 1k and 8k 498 and 728 against 523 and 730, window 1024 at 8k 539 against 578);
three stages of 96 keys (662 full at d = 128 against 708 for two of 128); a quarter of the
exponentials by polynomial (607 against 693; 510 against 535 at d = 64: the consumers wait for issue
slots and for power before they wait for the MUFU unit); one work tile for each CTA instead of a
persistent list (692 against 708 full, 446 against 500 with the window).
Other head dims have the shapes that fit; they were not measured.
"""

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


@attrs.frozen
class Shapes:
    """The shapes for some head dims.

    Attributes:
        masked: With a mask.
        everything: Where all is attended to; sequences shorter than `LONG` have `masked`.
        modified: With a mask and a score mod; None: `masked`.
        narrow: With a mask that leaves few key blocks of many; None: no other.
    """

    masked: Shape
    everything: Shape
    modified: Shape | None = None
    narrow: Shape | None = None


FEW, MANY = 4, 8  # tiles of 128 keys
LONG = 2048  # keys
_THREE = Shape(3, 96, consumer=160, producer=32, turns=False)

#: By the larger of the head dims, up to and including.
SHAPES: dict[int, Shapes] = {
    64: Shapes(
        masked=attrs.evolve(_THREE, stages=3),
        everything=attrs.evolve(_THREE, keys=112, stages=3),
        modified=_THREE,
        narrow=Shape(2, 128, stages=3, turns=False),
    ),
    96: Shapes(Shape(2, 128), Shape(2, 128)),
    128: Shapes(Shape(2, 128, turns=False), Shape(2, 144, turns=False)),
    192: Shapes(Shape(2, 96), Shape(2, 96)),
    256: Shapes(Shape(2, 80), Shape(2, 80)),
}


def shapes_of(head_dim: int, head_dim_v: int) -> Shapes:
    """The shapes to choose from for head dims."""
    d = max(head_dim, head_dim_v)
    return next(shapes for limit, shapes in SHAPES.items() if d <= limit)


def fitting(shape: Shape, rows: int) -> Shape:
    """A shape without warpgroups that the longest sequence's queries leave without work."""
    needed = max(1, -(-rows // 64))
    if needed >= shape.groups:
        return shape
    return attrs.evolve(shape, groups=needed, consumer=240, producer=24)
