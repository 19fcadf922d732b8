"""A variant's mask, score mod and sink in the kernel, on a thread's row.

No code for them runs on FULL tiles of a variant without a score mod; the mask is evaluated on
PARTIAL tiles only. What mods make of indices outside the problem is not used, and they read no
captured tensor there: queries are clamped once for the row, and the keys of a FULL tile are all
inside; on PARTIAL tiles, the index of every captured tensor is clamped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import cute

from fa4core.lowering.cute import Scope, as_bool, as_float, per_element, select
from fa4core.pipeline.effects import Fixed
from fa4core.sm100.forward.rows import Row
from fa4core.sm100.forward.spec import Spec
from primitives.expr import Node, algebra, captures, parse, walk

NEVER = -math.inf
UNROLLED = 10  # instructions for an element, roughly, that may be unrolled over a row


class Mods(Fixed):
    """Mask, score mod and sink with their captured tensors.

    Attributes:
        plain: Whether scores go unmodified, so that scaling can wait until the exponential.
        has_sink: Whether there is one more logit.
    """

    def __init__(self, spec: Spec, captured: tuple[cute.Tensor, ...]):
        self.mask, self.score, self.sink = parse(spec.graph)
        slots = captures(self.mask, self.score, self.sink)
        self.captured = dict(zip(slots, captured, strict=True))
        self.plain = self.score is algebra.var("score") and not spec.negative_scale
        self.has_sink = not (self.sink.is_const and self.sink.attr == NEVER)

    def nothing_to_do(self, partial: bool) -> bool:
        """Whether scores stay as they are."""
        return self.plain and not partial

    def long(self, partial: bool) -> bool:
        """Whether the code for one element is so long that it should not be there 128 times."""
        roots = [self.score, self.mask] if partial else [self.score]
        return sum(map(_length, walk(*roots))) > UNROLLED

    def apply(
        self,
        scores: cute.Tensor,
        item: Any,
        row: Row,
        first: Any,
        partial: bool,
        scale: Any,
        column: Callable[[int], int] = lambda i: i,
    ) -> None:
        """Modify (and on partial tiles mask) some scores of a row, in place.

        Args:
            scores: Raw products q . k.
            item: The work tile.
            row: Its query and head.
            first: Index of the first key.
            partial: Whether the tile is PARTIAL; else every pair inside is attended to.
            scale: Factor on q . k.
            column: Place of the i-th score behind `first`.
        """
        scope = self._row(item, row, partial)
        if partial:
            scope.hoist([self.mask])
        if not self.plain:
            scope.hoist([self.score])
        room = item.seqlen_k - first  # so that each key is compared with a constant
        for i in range(cute.size(scores)):
            k = first + column(i)
            value = scores[i] if self.plain else scores[i] * scale
            element = scope.element(k, value)
            if not self.plain:
                value = as_float(element.value(self.score))
            if partial:
                live = (column(i) < room) & as_bool(element.value(self.mask))
                value = select(live, value, NEVER, "float")
            scores[i] = value

    def sink_of(self, item: Any, row: Row) -> cutlass.Float32:
        """The sink's logit of a row, natural units."""
        return as_float(self._row(item, row, guarded=True).value(self.sink))

    def _row(self, item: Any, row: Row, guarded: bool) -> Scope:
        last = item.seqlen_q - 1
        variables = {
            "b": item.b,
            "h": row.head,
            "q": select(row.query < item.seqlen_q, row.query, last, "int"),
            "seqlen_q": item.seqlen_q,
            "seqlen_k": item.seqlen_k,
        }
        return Scope(variables, self.captured, guarded)


def _length(node: Node) -> int:
    """Instructions of a node for one element, roughly."""
    if not per_element(node) or node.op in ("var", "const"):
        return 0
    if node.op == "gather":
        return 3 * len(node.args)
    if node.op in ("floordiv", "mod"):
        return 5
    return 8 if node.op in algebra.UNARY else 1
