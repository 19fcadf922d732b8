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
from fa4core.lowering.affine import change_of
from fa4core.lowering.approximate import QUICK, Unit
from fa4core.lowering.assume import where_attended
from fa4core.lowering.cute import Scope, as_float, inside, select
from fa4core.lowering.factors import ONE, factored, needed_once
from fa4core.lowering.predicate import BITS, Predicate
from fa4core.lowering.words import leaves, per_element
from fa4core.pipeline.effects import Fixed
from fa4core.reference.exp2 import emulated
from fa4core.spec import LEAST_SCALE
from primitives.expr import Capture, Node, algebra, captures, parse, walk

NEVER = -math.inf
UNROLLED = 10  # instructions for an element, roughly, that may be unrolled over a row

Column = Callable[[int], int]


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
        scales: Whether the score mod itself scales what it is given.
    """

    scales = False

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
        for i, at, holds in self.each(scores, scope, first, partial, column):
            value = scores[i]
            if start is not None:
                value = value if self.scales else value * scale
                value = as_float(self.element(start, at, value, i).value(self.score))
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

    Modified scores times `factor_of` are in natural units.

    Attributes:
        form: The score mod as `factor * rest`.
        keeps: Whether elements are the rest only, because the skeleton has the factor in exponents.
        late: Whether, of the rest, `even` is left to the skeleton, too, but for what it grows by.
        has_sink: Whether there is one more logit.
        split: Whether a work tile has but a share of its keys.
    """

    scales = True

    def __init__(self, spec: ForwardSpec, captured: tuple[cute.Tensor, ...]):
        mask, score, self.sink = parse(spec.graph)
        slots = dict(zip(captures(mask, score, self.sink), captured, strict=True))
        within = algebra.less(algebra.var("k"), algebra.var("seqlen_k"))
        plain = score is algebra.var("score") and not spec.negative_scale
        live = algebra.logical_and(mask, within)
        (score,) = where_attended(live, [score])
        self.form = factored(score, LEAST_SCALE, not spec.negative_scale)
        # The softmax's exponentials first: each takes half of what a tanh does on FMA units.
        fraction = max(0.0, 2.0 * spec.exp.fraction - 1.0)
        super().__init__(live, self.form.whole, slots, fraction, plain)
        self.keeps = self.late = False
        self.has_sink = not (self.sink.is_const and self.sink.attr == NEVER)
        self.split = spec.split

    def keep_factor(self) -> None:
        """Leave the factor to the skeleton, and `even` numbers that are added."""
        self.keeps, self.late = True, self.form.even is not None
        self.score = self.form.rest

    def keep_raw(self) -> None:
        """Leave the factor to the skeleton if it is the scale, and `even` numbers are added."""
        if self.form.even is not None:
            self.keeps, self.score = True, self.form.rest

    @property
    def raw(self) -> bool:
        """Whether what is left is the raw score with an even number added."""
        return self.keeps and self.form.even is not None

    @property
    def by_query(self) -> bool:
        """Whether what elements need but once for a row, the factor among it, is the query's."""
        return any("q" in n.free for n in (self.form.factor, *needed_once(self.score)))

    def factor_of(self, item: Any, row: Row, scale: Any) -> Any:
        """What takes a row's elements to natural units, positive."""
        factor = self.form.factor if self.keeps or self.plain else ONE
        return as_float(self._row(item, row, None, scale).value(factor))

    def bias(self, item: Any, row: Row, first: Any, scale: Any, loaded: Any) -> tuple[Any, Any]:
        """What the raw score of key `first` gets added, and what more from key to key."""
        number = self.form.even
        assert number is not None
        scope = self._row(item, row, loaded, scale)
        start = as_float(scope.element(first).value(number))
        return start, as_float(scope.value(change_of(number)))

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
        scope = self._row(item, row, loaded, scale)
        self.modify(scores, scope, first, partial, scale, column)

    def start(self, scope: Scope, first: Any, roots: list[Node]) -> Scope:
        started = super().start(scope, first, roots)
        if self.late and self.form.even is not None:
            started.values[self.form.even] = 0.0  # `bias` has it
        return started

    def load(self, item: Any, row: Row, scale: Any = None) -> Loaded:
        """Compute what a row's score mod needs but once for all of its tiles: with a scale all of
        it, else values of captured tensors."""
        scope = self._row(item, row, None, scale)
        nodes = needed_once(self.score)
        if scale is None:
            nodes = [n for n in walk(self.score) if n.op == "gather" and not per_element(n)]
        return Loaded({n: scope.value(n) for n in nodes})

    def sink_of(self, item: Any, row: Row) -> cutlass.Float32:
        """The sink's logit of a row, natural units; the first share of its keys has it, for all."""
        logit = as_float(self._row(item, row).value(self.sink))
        return select(item.share == 0, logit, NEVER, "float") if self.split else logit

    def _row(self, item: Any, row: Row, loaded: Loaded | None = None, scale: Any = None) -> Scope:
        variables = {
            "b": item.b,
            "h": row.head,
            "q": inside(row.query, item.seqlen_q),
            "seqlen_q": item.seqlen_q,
            "seqlen_k": item.seqlen_k,
            "scale": scale,
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
