"""A variant's mask, score mod and sink in the kernel, on a thread's row.

No code for them runs on FULL tiles of a variant without a score mod; the mask is evaluated on
PARTIAL tiles only. What mods make of indices outside the problem is not used, and they read no
captured tensor there: queries are clamped once for the row, and the keys of a FULL tile are all
inside. Whatever a variant asks for, no index of a captured tensor leaves it: it is clamped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import cutlass
from cutlass import cute

from fa4core.forward.spec import ForwardSpec
from fa4core.forward.work import Row
from fa4core.lowering.affine import change, change_of
from fa4core.lowering.approximate import QUICK, Unit
from fa4core.lowering.assume import where_attended
from fa4core.lowering.cute import Scope, as_float, inside, select
from fa4core.lowering.predicate import BITS, Predicate
from fa4core.lowering.words import leaves, per_element
from fa4core.pipeline.effects import Fixed
from fa4core.reference.exp2 import emulated
from primitives.expr import Capture, Node, algebra, captures, parse, walk

NEVER = -math.inf
UNROLLED = 10  # instructions for an element, roughly, that may be unrolled over a row

Column = Callable[[int], int]


def even_bias(score: Node) -> tuple[Node, float] | None:
    """What a score mod adds to the score, and its sign, if that changes evenly from key to key.

    None if it is the same for all keys: such numbers may be so large, to say that a row has no key,
    that dividing them by the scale would make them infinite.
    """
    if score.op not in ("add", "sub") or len(score.args) != 2:
        return None
    a, b = score.args
    if score.op == "add" and b is algebra.var("score"):
        a, b = b, a
    if a is not algebra.var("score") or "score" in b.free:
        return None
    if not per_element(b) or change(b) is None:
        return None
    return b, -1.0 if score.op == "sub" else 1.0


def in_order(i: int) -> int:
    """The places of elements that lie one behind the other."""
    return i


class Elements(Fixed):
    """A mask and a score mod, on elements of which a thread has a row.

    Attributes:
        live: Which elements count: the mask, and that the element is inside the problem.
        score: The score mod.
        captured: The tensor of each capture.
        fraction: Share of the elements whose transcendental functions are computed on FMA units.
        plain: Whether scores go unmodified, so that scaling can wait until the exponential.
        raw: Whether that waits although they are modified: modified scores are divided by `scale`.
    """

    def __init__(
        self,
        live: Node,
        score: Node,
        captured: dict[Capture, cute.Tensor],
        fraction: float,
        plain: bool,
    ):
        self.live, self.score, self.captured = live, score, captured
        self.fraction, self.plain = fraction, plain
        self.raw = False

    def nothing_to_do(self, partial: bool) -> bool:
        """Whether scores stay as they are."""
        return self.plain and not partial

    def long(self, partial: bool) -> bool:
        """Whether the code for one element is so long that it should not be there 128 times."""
        roots = [self.score, *leaves(self.live)] if partial else [self.score]
        return sum(map(length, walk(*roots))) > UNROLLED

    def modify(
        self,
        scores: cute.Tensor,
        scope: Scope,
        first: Any,
        partial: bool,
        scale: Any,
        column: Column,
    ) -> None:
        """Modify (and on partial tiles mask) some scores of a row, in place.

        Args:
            scores: Raw products q . k.
            scope: Of the row.
            first: Index of the first element.
            partial: Whether the tile is PARTIAL; else every pair inside is attended to.
            scale: Factor on q . k.
            column: Place of the i-th score behind `first`, ascending.
        """
        start = None if self.plain else self.start(scope, first, [self.score])
        per_scale = cute.arch.rcp_approx(scale) if self.raw else None
        for i, at, holds in self.each(scores, scope, first, partial, column):
            value = scores[i]
            if start is not None:
                value = as_float(self.element(start, at, value * scale, i).value(self.score))
                value = value * per_scale if self.raw else value
            scores[i] = value if holds is None else select(holds, value, NEVER, "float")

    def each(
        self, scores: cute.Tensor, scope: Scope, first: Any, partial: bool, column: Column
    ) -> Iterator[tuple[int, int, Any]]:
        """Number and place of every element, and whether it counts; None where all do."""
        start, live = -BITS, None
        for i in range(cute.size(scores)):
            at = column(i)
            if at >= start + BITS and partial:
                start = at // BITS * BITS
                live = Predicate(self.live, scope, first + start)
            yield i, at, live and live.at(at - start, scope.element(first + at))

    def start(self, scope: Scope, first: Any, roots: list[Node]) -> Scope:
        """The scope of a row's first element, with what `roots` need once emitted here."""
        scope.hoist(roots)
        return scope.first(first, roots)

    def element(self, start: Scope, at: int, score: Any, i: int) -> Scope:
        """The scope of a row's i-th element, `at` behind `start`, with its scaled score."""
        unit: Unit = "fma" if emulated(i, self.fraction) else "mufu"
        return start.behind(at, score, unit)


class Loaded(Fixed):
    """Values of captured tensors, by their nodes."""

    def __init__(self, values: dict[Node, Any]):
        self.values = values


class Mods(Elements):
    """Mask, score mod and sink of the forward pass: a row is a query, its elements are keys.

    Attributes:
        has_sink: Whether there is one more logit.
        split: Whether a work tile has but a share of its keys.
    """

    def __init__(self, spec: ForwardSpec, captured: tuple[cute.Tensor, ...]):
        mask, score, self.sink = parse(spec.graph)
        slots = dict(zip(captures(mask, score, self.sink), captured, strict=True))
        within = algebra.less(algebra.var("k"), algebra.var("seqlen_k"))
        plain = score is algebra.var("score") and not spec.negative_scale
        live = algebra.logical_and(mask, within)
        (score,) = where_attended(live, [score])
        # The softmax's exponentials first: each takes half of what a tanh does on FMA units.
        fraction = max(0.0, 2.0 * spec.exp.fraction - 1.0)
        super().__init__(live, score, slots, fraction, plain)
        self.has_sink = not (self.sink.is_const and self.sink.attr == NEVER)
        self.split, self.negative_scale = spec.split, spec.negative_scale

    def keep_raw(self) -> None:
        """Let scaling wait until the exponential if the score mod has an `even_bias`."""
        self.raw = even_bias(self.score) is not None and not self.negative_scale

    def bias(self, item: Any, row: Row, first: Any, scale: Any, loaded: Loaded) -> tuple[Any, Any]:
        """What the raw score of key `first` gets added, and what more from key to key."""
        found = even_bias(self.score)
        assert found is not None
        number, sign = found
        scope, factor = self._row(item, row, loaded), cute.arch.rcp_approx(scale) * sign
        start = as_float(scope.element(first).value(number))
        return start * factor, as_float(scope.value(change_of(number))) * factor

    def apply(
        self,
        scores: cute.Tensor,
        item: Any,
        row: Row,
        first: Any,
        partial: bool,
        scale: Any,
        column: Column = in_order,
        loaded: Loaded | None = None,
    ) -> None:
        """See `modify`; `item` is the work tile, `row` its query and head, `first` a key."""
        scope = self._row(item, row, loaded)
        self.modify(scores, scope, first, partial, scale, column)

    def load(self, item: Any, row: Row) -> Loaded:
        """Read what a row's score mod needs of captured tensors, once for all of its tiles."""
        scope = self._row(item, row)
        nodes = [n for n in walk(self.score) if n.op == "gather" and not per_element(n)]
        return Loaded({n: scope.value(n) for n in nodes})

    def sink_of(self, item: Any, row: Row) -> cutlass.Float32:
        """The sink's logit of a row, natural units; the first share of its keys has it, for all."""
        logit = as_float(self._row(item, row).value(self.sink))
        return select(item.share == 0, logit, NEVER, "float") if self.split else logit

    def _row(self, item: Any, row: Row, loaded: Loaded | None = None) -> Scope:
        variables = {
            "b": item.b,
            "h": row.head,
            "q": inside(row.query, item.seqlen_q),
            "seqlen_q": item.seqlen_q,
            "seqlen_k": item.seqlen_k,
        }
        scope = Scope(variables, self.captured)
        if loaded is not None:
            scope.values.update(loaded.values)
        return scope


def length(node: Node) -> int:
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
