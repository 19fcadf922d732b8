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

from fa4core.forward.spec import ForwardSpec
from fa4core.forward.work import Row
from fa4core.lowering.approximate import QUICK, Unit
from fa4core.lowering.cute import Scope, as_float, select
from fa4core.lowering.predicate import BITS, Predicate
from fa4core.lowering.words import leaves, per_element
from fa4core.pipeline.effects import Fixed
from fa4core.reference.exp2 import emulated
from primitives.expr import Node, algebra, captures, parse, walk

NEVER = -math.inf
UNROLLED = 10  # instructions for an element, roughly, that may be unrolled over a row


class Mods(Fixed):
    """Mask, score mod and sink with their captured tensors.

    Attributes:
        live: The mask, and that the key is inside.
        fraction: Share of the elements whose transcendental functions are computed on FMA units.
        plain: Whether scores go unmodified, so that scaling can wait until the exponential.
        has_sink: Whether there is one more logit.
        split: Whether a work tile has but a share of its keys.
    """

    def __init__(self, spec: ForwardSpec, captured: tuple[cute.Tensor, ...]):
        self.mask, self.score, self.sink = parse(spec.graph)
        slots = captures(self.mask, self.score, self.sink)
        self.captured = dict(zip(slots, captured, strict=True))
        inside = algebra.less(algebra.var("k"), algebra.var("seqlen_k"))
        self.live = algebra.logical_and(self.mask, inside)
        self.fraction, self.split = spec.exp.fraction, spec.split
        self.plain = self.score is algebra.var("score") and not spec.negative_scale
        self.has_sink = not (self.sink.is_const and self.sink.attr == NEVER)

    def nothing_to_do(self, partial: bool) -> bool:
        """Whether scores stay as they are."""
        return self.plain and not partial

    def long(self, partial: bool) -> bool:
        """Whether the code for one element is so long that it should not be there 128 times."""
        roots = [self.score, *leaves(self.live)] if partial else [self.score]
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
        if not self.plain:
            scope.hoist([self.score])
        start = -BITS
        for i in range(cute.size(scores)):
            at = column(i)
            if at >= start + BITS:
                start = at // BITS * BITS
                live = Predicate(self.live, scope, first + start)
            value = scores[i] if self.plain else scores[i] * scale
            if not self.plain:
                unit: Unit = "fma" if emulated(i, self.fraction) else "mufu"
                value = as_float(scope.element(first + at, value, unit).value(self.score))
            if partial:
                holds = live.at(at - start, scope.element(first + at))
                value = select(holds, value, NEVER, "float")
            scores[i] = value

    def sink_of(self, item: Any, row: Row) -> cutlass.Float32:
        """The sink's logit of a row, natural units; the first share of its keys has it, for all."""
        logit = as_float(self._row(item, row, guarded=True).value(self.sink))
        return select(item.share == 0, logit, NEVER, "float") if self.split else logit

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
        return 10 * len(node.args)  # clamped, scaled, added to the address, loaded
    if node.op in ("floordiv", "mod"):
        return 5
    if node.op in QUICK:
        return 3
    return 8 if node.op in algebra.UNARY else 1
