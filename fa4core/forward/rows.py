"""Which query and which head a row of a query tile is, and where its results go.

A tile holds `spec.queries` consecutive queries of `spec.packed` consecutive heads, the head
fastest; one head where none are packed. Rows that are left over lie behind every sequence's end.
"""

from __future__ import annotations

from typing import Any

from cutlass import cute

from fa4core.forward.spec import ForwardSpec
from fa4core.forward.work import Row
from fa4core.lowering.cute import select


def row_at(spec: Any, item: Any, t: Any, place: Any) -> Row:
    """The row at a place in query tile `t` of the `spec.tiles` of a work tile."""
    first = (item.tile * spec.tiles + t) * spec.queries
    if spec.packed == 1:
        return Row(first + place, item.h)
    query = select(place < spec.rows, first + place // spec.packed, item.seqlen_q, "int")
    return Row(query, item.h * spec.packed + place % spec.packed)


def results_batch(spec: ForwardSpec, item: Any, batches: Any) -> Any:
    """Batch entry of a work tile's results, of queries with `batches` entries."""
    return item.b_q + item.share * batches if spec.split else item.b_q


@cute.jit
def write_row(to: cute.Tensor, item: Any, row: Row, b: Any, value: Any, wanted: Any = True):
    """A number of a row into (seqlen_q, heads, batch), unless the row is behind the end."""
    if (row.query < item.seqlen_q) & wanted:
        to[item.start_q + row.query, row.head, b] = value
