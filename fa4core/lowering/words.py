"""Masks as words: the truth of 32 neighbouring keys as the bits of one integer.

A comparison whose integer side grows with the key, step by step, is true from a bound on or below
it, and the bound is the same for the whole row. So its word is a shift of all ones, boolean algebra
of such comparisons is algebra of words, and 32 keys cost what one would. It knows the graph only;
`predicate` emits words as kernel code, and the bounds are nodes that anything can evaluate.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import attrs

from primitives.expr import Node, algebra

_PER_ELEMENT = frozenset({"k", "score"})
_FOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


def per_element(node: Node) -> bool:
    """Whether a node's value differs between the elements of a row."""
    return bool(node.free & _PER_ELEMENT)


@attrs.frozen
class Edge:
    """True for keys from `bound` on if `rising`, else for keys below it."""

    bound: Node
    rising: bool


def edge(node: Node) -> Edge | None:
    """A condition as an edge, if it is `x >= 0` for an integer x that is monotone in the key."""
    return _reaches(node.args[0], algebra.const(0)) if node.op == "ge0" else None


def _reaches(x: Node, least: Node) -> Edge | None:
    """`x >= least` as an edge; `least` is the same for the whole row."""
    if x is algebra.var("k"):
        return Edge(least, rising=True)
    if x.op == "floordiv" and x.args[1].is_const and x.args[1].attr > 0:
        return _reaches(x.args[0], algebra.mul(least, x.args[1]))
    if x.op != "linear":
        return None
    terms = dict(zip(x.args, x.attr[0], strict=True))
    moving = [term for term in terms if per_element(term)]
    if len(moving) != 1:
        return None
    (term,) = moving
    factor = terms.pop(term)
    room = algebra.sub(least, algebra.linear(terms, x.attr[1]))  # factor * term >= room
    if factor > 0:
        return _reaches(term, algebra.neg(algebra.floordiv(algebra.neg(room), factor)))
    below = _reaches(term, algebra.add(algebra.floordiv(algebra.neg(room), -factor), 1))
    return None if below is None else Edge(below.bound, not below.rising)


def is_word(node: Node) -> bool:
    """Whether a condition has a word: boolean algebra of edges and of what is fixed in a row."""
    if not per_element(node):
        return True
    if node.op == "eq0":
        return all(map(is_word, _both_sides(node)))
    if node.op in _FOLDS or node.op == "not":
        return all(map(is_word, node.args))
    return edge(node) is not None


def word(node: Node, of_edge: Callable[[Edge], Any], of_row: Callable[[Node], Any]) -> Any:
    """The word of a condition that has one.

    Args:
        node: The condition.
        of_edge: Gives the word of an edge: an integer with `& | ^ ~`.
        of_row: Gives all ones or all zeros for a condition that is fixed in a row.
    """
    if not per_element(node):
        return of_row(node)
    if node.op == "not":
        return ~word(node.args[0], of_edge, of_row)
    if node.op == "eq0":
        return word(algebra.logical_and(*_both_sides(node)), of_edge, of_row)
    if node.op in _FOLDS:
        return functools.reduce(_FOLDS[node.op], (word(a, of_edge, of_row) for a in node.args))
    found = edge(node)
    assert found is not None, node
    return of_edge(found)


def _both_sides(node: Node) -> tuple[Node, Node]:
    """`x == 0` as `x >= 0` and `x <= 0`."""
    return algebra.less_equal(0, node.args[0]), algebra.less_equal(node.args[0], 0)


def split(node: Node) -> tuple[Node | None, list[Node]]:
    """The operands of an `and`, `or` or `xor`: those with words joined to one, and the others."""
    rest = [a for a in node.args if not is_word(a)]
    words = [a for a in node.args if is_word(a)]
    return Node(node.op, words, "bool") if len(words) > 1 else next(iter(words), None), rest


def leaves(node: Node) -> list[Node]:
    """What must be evaluated for every element: the conditions of a mask that have no word."""
    if is_word(node):
        return []
    if node.op in _FOLDS or node.op == "not":
        return [leaf for a in node.args for leaf in leaves(a)]
    return [node]
