"""A variant's mask and score mod in the backward kernels, and their derivatives.

A thread has a key, and its elements are queries: rows and elements have changed places, so the
graph's variables `q` and `k` do, too, and all else is the forward's. No code for mods runs on FULL
tiles of a variant without a score mod. Where a pair is not attended to, whatever mods or their
derivatives make of it has no effect, and no captured tensor is read or added to outside.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute

from fa4core.backward.exact import NEIGHBOURS, POWERS
from fa4core.backward.rule import Rule
from fa4core.backward.spec import BackwardSpec
from fa4core.forward.mods import Column, Elements, in_order
from fa4core.lowering.assume import where_attended
from fa4core.lowering.cute import Scope, as_float, place_in, select
from fa4core.lowering.words import per_element
from primitives.expr import Node, algebra

Q, K = algebra.var("q"), algebra.var("k")


class GradMods(Elements):
    """Mask, score mod and derivatives with the captured tensors and their gradients.

    Attributes:
        by_score: d value / d score.
        elements: For each element of a captured tensor with a gradient: indices, the tensor to add
            to, which in deterministic kernels has bins (`exact`), and d value / d element.
        simple: Whether `differentiate` does nothing.
    """

    def __init__(
        self,
        spec: BackwardSpec,
        captured: tuple[cute.Tensor, ...],
        grad_captured: tuple[cute.Tensor, ...],
    ):
        rule = Rule.parse(spec.graph)
        slots = dict(zip(rule.captures, captured, strict=True))
        receivers = dict(zip(rule.receivers, grad_captured, strict=True))
        rule = rule.exchanged({Q: K, K: Q})
        within = algebra.logical_and(
            algebra.less(K, algebra.var("seqlen_q")), algebra.less(Q, algebra.var("seqlen_k"))
        )
        live, plain = algebra.logical_and(rule.mask, within), rule.score is algebra.var("score")
        plain = plain and not spec.negative_scale
        nodes, shares = [n for n, _ in rule.elements], [by for _, by in rule.elements]
        score, self.by_score, *shares = where_attended(live, [rule.score, rule.by_score, *shares])
        super().__init__(live, score, slots, spec.exp.fraction, plain)
        self.elements = [
            (node.args, receivers[node.attr], by) for node, by in zip(nodes, shares, strict=True)
        ]
        self.simple = rule.is_identity
        self.add = _add_exactly if spec.deterministic else _add

    def apply(
        self,
        scores: cute.Tensor,
        item: Any,
        head: Any,
        key: Any,
        first: Any,
        partial: bool,
        scale: Any,
        column: Column = in_order,
    ) -> None:
        """See `modify`; -inf where a pair is not attended to.

        Args:
            scores: Raw products q . k of a key.
            item: The work tile.
            head: The query head.
            key: Index of the key.
            first: Index of the first query.
            partial: Whether the tile is PARTIAL; else every pair is inside and attended to.
            scale: Factor on q . k.
            column: Place of the i-th query behind `first`, ascending.
        """
        self.modify(scores, self._row(item, head, key), first, partial, scale, column)

    def differentiate(
        self,
        scores: cute.Tensor,
        grads: cute.Tensor,
        item: Any,
        head: Any,
        key: Any,
        first: Any,
        partial: bool,
        scale: Any,
        column: Column = in_order,
    ) -> None:
        """From gradients of the score mod's values to those of scaled scores, in place; and add the
        shares of captured tensors.

        Args:
            scores: Raw products q . k of a key; likewise all but `grads` as in `apply`.
            grads: Gradients of the values: P (dP - delta).
        """
        if self.simple:
            return
        scope = self._row(item, head, key)
        needed = [self.by_score, *(n for where, _, by in self.elements for n in (*where, by))]
        start = self.start(scope, first, needed)
        sums = [cutlass.Float32(0.0) for _ in self.elements]
        for i, at, holds in self.each(scores, scope, first, partial, column):
            element = self.element(start, at, scores[i] * scale, i)
            for n, (where, to, by) in enumerate(self.elements):
                share = _counted(holds, grads[i] * as_float(element.value(by)))
                if any(map(per_element, where)):
                    self.add(to, [element.value(index) for index in where], share)
                else:
                    sums[n] = sums[n] + share
            grads[i] = _counted(holds, grads[i] * as_float(element.value(self.by_score)))
        for (where, to, _), total in zip(self.elements, sums, strict=True):
            self._add_sum(to, where, scope, total)

    def _add_sum(self, to: cute.Tensor, where: tuple[Node, ...], scope: Scope, total: Any) -> None:
        """Add what a thread's elements give together, and all threads of a warp if it is theirs."""
        if any(map(per_element, where)):
            return
        indices = [scope.value(index) for index in where]
        if any(Q.attr in index.free for index in where):
            self.add(to, indices, total)
            return
        total = cute.arch.warp_reduction_sum(total)
        with cute.arch.elect_one():
            self.add(to, indices, total)

    def _row(self, item: Any, head: Any, key: Any) -> Scope:
        variables = {
            "b": item.b,
            "h": head,
            "q": key,  # outside on PARTIAL tiles only, where no index of a tensor stays outside
            "seqlen_q": item.seqlen_q,
            "seqlen_k": item.seqlen_k,
        }
        return Scope(variables, self.captured)


def _counted(holds: Any, value: Any) -> Any:
    return value if holds is None else select(holds, value, 0.0, "float")


def _add(to: cute.Tensor, indices: list, share: Any) -> None:
    place = cute.crd2idx(place_in(to, indices), to.layout)
    cute.arch.atomic_add(to.iterator + place, share, sem="relaxed", scope="gpu")


def _add_exactly(to: cute.Tensor, indices: list, share: Any) -> None:
    """To the bin that the number's exponent says; see `exact`."""
    bits = cute.make_rmem_tensor(cute.make_layout(1), cutlass.Float32)
    bits[0] = as_float(share)
    word = cute.recast_tensor(bits, cutlass.Int32)[0]
    exponent, fraction = (word >> 23) & 0xFF, word & 0x7FFFFF
    fraction = select(exponent == 0, fraction, fraction | 1 << 23, "int")
    fraction = select(word < 0, -fraction, fraction, "int")
    exponent = select(exponent == 0, 1, exponent, "int")
    number = exponent < 0xFF
    which = select(number, exponent // NEIGHBOURS, POWERS, "int")
    whole = cutlass.Int64(select(number, fraction, 1, "int"))
    whole = whole << cutlass.Int64(select(number, exponent % NEIGHBOURS, 0, "int"))
    place = cute.crd2idx((*place_in(to, indices), which), to.layout)
    cute.arch.atomic_add(to.iterator + place, whole, sem="relaxed", scope="gpu")
