"""Which query and which head a row of a query tile is.

A tile holds `spec.queries` consecutive queries of `spec.packed` consecutive heads, the head
fastest; one head where none are packed. Rows that are left over lie behind every sequence's end.
"""

from __future__ import annotations

from typing import Any

import attrs

from fa4core.lowering.cute import select
from fa4core.sm100.forward.spec import Spec


@attrs.frozen(eq=False)
class Row:
    """Index of the query within its sequence, not below `seqlen_q` if there is none; its head."""

    query: Any
    head: Any


def row_of(spec: Spec, item: Any, t: Any, thread: Any) -> Row:
    """The row of `thread` in query tile `t` of a work tile."""
    first = (item.tile * spec.tiles + t) * spec.queries
    if spec.packed == 1:
        return Row(first + thread, item.h)
    query = select(thread < spec.rows, first + thread // spec.packed, item.seqlen_q, "int")
    return Row(query, item.h * spec.packed + thread % spec.packed)
