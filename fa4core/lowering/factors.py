"""Score mods with as few multiplications as they need.

A score mod is written as `factor * rest`, where the factor is the same for a whole row and goes,
like the scale of unmodified scores, into the multiply-add that every exponent has anyhow. Inside
the rest, products by such numbers are merged: softcap's scale / cap is one number. Merging reorders
products, so a result may differ by a few roundings of float32, and products of factors may overflow
where the mod's own order doesn't. It knows the graph only; kernels' mods use it.
"""

from __future__ import annotations

import functools
import math

import attrs

from fa4core.lowering.affine import change, change_of, even
from fa4core.lowering.words import per_element
from primitives.expr import Node, algebra, walk
from primitives.expr.rebuild import rebuild, substitute

SCORE, SCALE = algebra.var("score"), algebra.var("scale")
ONE = algebra.const(1.0)

#: No larger than a few units.
_BOUNDED = frozenset({"tanh", "sigmoid", "sin", "cos", "asin", "acos", "atan", "erf", "erfc"})

#: f(-x) = -f(x), of those: a factor in front of them can give its sign to one inside.
_ODD = frozenset({"tanh", "sin", "asin", "atan", "erf"})


@attrs.frozen(slots=False)
class Factored:
    """`factor * rest`; in both, `score` stands for q . k before it is scaled, and `scale` for its
    factor.

    Attributes:
        factor: Positive, and the same for a row.
        rest: What is left for each element.
    """

    factor: Node
    rest: Node

    @property
    def whole(self) -> Node:
        return product(self.factor, self.rest)

    @property
    def even(self) -> Node | None:
        """What the rest adds to the raw score, if it changes evenly from key to key (`affine`)."""
        bias = _added_to(SCORE, self.rest)
        return bias if bias is not None and change(bias) is not None else None


def factored(score: Node, least: float, positive: bool = True) -> Factored:
    """A score mod, over `score`, in that form.

    Args:
        score: The mod.
        least: Of factors: others would not let -inf survive.
        positive: Whether the scale is at least that.
    """
    (score,) = substitute([score], {SCORE: algebra.mul(SCALE, SCORE)})
    factor, rest = _split(score)
    if positive and factor is ONE:
        bias = _added_to(algebra.mul(SCALE, SCORE), rest)
        if bias is not None and change(bias) is not None:
            return Factored(SCALE, algebra.add(SCORE, product(algebra.div(1.0, SCALE), bias)))
    if factor is SCALE and positive:
        return Factored(factor, rest)
    if not _positive(factor, positive):
        if rest.op not in _ODD:
            return Factored(ONE, product(factor, rest))
        sign = algebra.where(algebra.less(factor, 0.0), -1.0, 1.0)  # of 0, too: see `softcap(0)`
        inner = product(sign, rest.args[0])
        factor, rest = algebra.absolute(factor), algebra.unary(rest.op, inner)
    if factor.is_const:
        sane = least <= factor.attr < math.inf
        return Factored(factor, rest) if sane else Factored(ONE, product(factor, rest))
    if not _moderate(rest):
        return Factored(ONE, product(factor, rest))
    return Factored(algebra.where(algebra.less(factor, least), least, factor), rest)  # keeps NaN


def needed_once(rest: Node) -> list[Node]:
    """The floats that elements need, and that are the same for a whole row."""
    uniform = [a for n in walk(rest) if per_element(n) for a in n.args if not per_element(a)]
    uniform += [change_of(bias) for bias in even(rest)]
    return [n for n in dict.fromkeys(uniform) if n.kind == "float" and n.args]


def product(factor: Node, rest: Node) -> Node:
    """`factor * rest`, with the factor merged into what the rest's terms are multiplied by."""
    if factor is ONE:
        return rest
    if rest.op in ("add", "sub") and per_element(rest):
        return rebuild(rest, tuple(product(factor, term) for term in rest.args))
    inner, rest = _split(rest)
    return algebra.mul(_times(factor, inner), rest)


@functools.lru_cache(maxsize=4096)
def _split(node: Node) -> tuple[Node, Node]:
    """The product of a node's uniform factors, and what they multiply."""
    if node.kind != "float" or node.op == "var" or not per_element(node):
        return ONE, node
    if node.op == "mul":
        (left, a), (right, b) = (_split(x) if per_element(x) else (x, ONE) for x in node.args)
        return _times(left, right), algebra.mul(a, b)
    if node.op == "div" and not per_element(node.args[1]):
        factor, rest = _split(node.args[0])
        return algebra.div(factor, node.args[1]), rest
    if node.op in ("neg", "abs"):
        factor, rest = _split(node.args[0])
        return rebuild(node, (factor,)), rest if node.op == "neg" else rebuild(node, (rest,))
    return ONE, rebuild(node, tuple(_whole(arg) for arg in node.args))


def _whole(node: Node) -> Node:
    return product(*_split(node))


def _times(a: Node, b: Node) -> Node:
    """A product, its division last: 1 / x may be too coarse, or infinite."""
    if b.op == "div":
        a, b = b, a
    if a.op == "div" and a is not b:
        return algebra.div(_times(a.args[0], b), a.args[1])
    return algebra.mul(a, b)


def _moderate(rest: Node) -> bool:
    """Whether a factor below `least` may be replaced by it: the product is about 0 anyhow."""
    return rest is SCORE or rest.op in _BOUNDED or (rest.op == "abs" and rest.args[0] is SCORE)


def _positive(factor: Node, scale: bool) -> bool:
    """Whether a uniform number can be told not to be negative."""
    if factor.is_const:
        return factor.attr > 0
    if factor.op in ("mul", "div"):
        return all(_positive(arg, scale) for arg in factor.args)
    return (factor is SCALE and scale) or factor.op in ("abs", "exp", "exp2", "sigmoid")


def _added_to(what: Node, total: Node) -> Node | None:
    """The other term of a sum, if it differs from key to key and has no score in it.

    One that is the same for all keys may be so large, to say that a row has no key, that dividing
    it by the scale would make it infinite.
    """
    if total.op not in ("add", "sub") or what not in total.args:
        return None
    first, second = total.args
    if total.op == "add":
        other = first if second is what else second
    elif first is what:
        other = algebra.mul(-1.0, second)
    else:
        return None
    return None if "score" in other.free or not per_element(other) else other
