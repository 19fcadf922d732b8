"""A mask on the device: words where it has them, element by element where not.

Used by kernels' softmax roles. Testing one bit of a word for each key is what the hardware unpacks
into predicate registers at once.
"""

from __future__ import annotations

import functools
from typing import Any

import cutlass
from cutlass import cute

from fa4core.lowering.cute import Scope, as_bool, as_int, select
from fa4core.lowering.words import Edge, is_word, split, word
from primitives.expr import Node

BITS = 32


class Predicate:
    """A condition for `BITS` keys of a row, from `first` on.

    Args:
        node: The condition.
        row: The scope of the row.
        first: The first key.
    """

    def __init__(self, node: Node, row: Scope, first: Any):
        self.node, self.row, self.first = node, row, first
        self.words: dict[Node, Any] = {}  # None: there is none

    def at(self, i: int, element: Scope) -> Any:
        """Whether it holds for key `first + i`, whose scope is `element`."""
        return self._at(self.node, i, element)

    def _at(self, node: Node, i: int, element: Scope) -> Any:
        if node not in self.words:
            self.words[node] = word(node, self._edge, self._fixed) if is_word(node) else None
        if self.words[node] is not None:
            bit = 1 << i if i < BITS - 1 else -1 << i
            return (self.words[node] & bit) != 0
        if node.op == "not":
            return as_int(self._at(node.args[0], i, element)) == 0
        if node.op not in ("and", "or", "xor"):
            return as_bool(element.value(node))
        joined, rest = split(node)
        operands = [self._at(n, i, element) for n in ([joined] if joined else []) + rest]
        join = {"and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b}
        return functools.reduce(join[node.op], operands)

    def _edge(self, edge: Edge) -> Any:
        behind = as_int(self.row.value(edge.bound)) - self.first
        behind = select(behind < 0, 0, behind, "int")
        # PTX defines the result for every amount from 32 on: 0
        rising = cute.arch.inline_ptx(
            "shl.b32 {$w0}, -1, {$r0};",
            write_only_types=[cutlass.Int32],
            read_only_args=[behind],
        )
        return rising if edge.rising else ~rising

    def _fixed(self, node: Node) -> Any:
        return select(self.row.value(node), -1, 0, "int")
