"""The scheduler's three choices: coordinate map x work source x order.

See FlashAttention-4, section 3.3, for the orders; the choices change time, never results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import attrs

Coordinates = Literal["heads", "packed_gqa", "split_kv"]
Source = Literal["one_tile", "persistent", "dynamic"]
Ctas = Literal[1, 2]
Order = Literal["in_order", "longest_first", "shortest_first", "batch_sorted"]


def _one_of(accepted: object) -> Callable[[object, attrs.Attribute, object], None]:
    choices = get_args(accepted)

    def check(_: object, attribute: attrs.Attribute, value: object) -> None:
        if not any(value == c and type(value) is type(c) for c in choices):
            named = ", ".join(map(repr, choices))
            raise ValueError(f"{attribute.name}={value!r}; accepted are {named}")

    return check


@attrs.frozen
class Schedule:
    """How work tiles are numbered, handed out and ordered.

    Attributes:
        coordinates: What a tile stands for: a query head; a KV head with its query heads packed
            into the rows; or a share of the keys, combined afterwards.
        source: One tile per CTA, a static list per CTA, or a work queue (CLC on Blackwell).
        order: In order; longest processing time first; shortest first; sequences sorted by the
            time of their longest tile.
        num_splits: Shares of the keys, with `coordinates="split_kv"`; 1 otherwise.
        l2_sections: Group heads so that their keys and values fit the L2 cache; the order holds
            within such a section of a sequence, where all query heads of a KV head are side by
            side. Without, it holds for all tiles together, or within sequences that are sorted.
        ctas: CTAs that share a work tile and its matrix products: 1, or 2 on Blackwell. A pair has
            twice the queries, and each of the two holds only half of every key tile.

    Raises:
        ValueError, TypeError: A choice that there is not, or splits without `split_kv`.
    """

    coordinates: Coordinates = attrs.field(default="heads", validator=_one_of(Coordinates))
    source: Source = attrs.field(default="persistent", validator=_one_of(Source))
    order: Order = attrs.field(default="longest_first", validator=_one_of(Order))
    num_splits: int = 1
    l2_sections: bool = True
    ctas: int = attrs.field(default=1, validator=_one_of(Ctas))

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.num_splits, int) or isinstance(self.num_splits, bool):
            raise TypeError(f"num_splits={self.num_splits!r}; an int is accepted")
        if self.num_splits < 1 or (self.num_splits > 1) != (self.coordinates == "split_kv"):
            raise ValueError(
                f"num_splits={self.num_splits} with coordinates={self.coordinates!r}; more than "
                "one split goes with coordinates='split_kv', and split_kv with at least two"
            )


def split_kv(num_splits: int) -> Schedule:
    """Share the keys of a tile among `num_splits` workers and combine (decode).

    Args:
        num_splits: At least 2.
    """
    return Schedule(coordinates="split_kv", num_splits=num_splits)
