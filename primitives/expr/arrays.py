"""The values a trace is made of: arrays given by a rule from indices to nodes.

A traced function may handle whole captured tensors before it indexes them (`table[h][q - k]`,
`slopes.sigmoid()[h]`). An `Array` of shape `shape` is a rule that takes one node per dimension and
gives the node of that element; indexing is applying the rule. A scalar has shape `()`.

Gradients of captured tensors come out of autograd as sums of `index_put` into zeros. A `Scatter`
keeps them so: a list of (indices, value), which is what a kernel adds with atomics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import attrs

from primitives.expr import algebra as A
from primitives.expr.errors import Refusal
from primitives.expr.node import Capture, Kind, Node

Indices = tuple[Node, ...]


class Array:
    """`at(indices)` gives the node of one element.

    Elements are found by `rule` and remembered: expressions share their operands, and following
    every path to an operand would take exponential time. The element of a 0-d array is found at
    once, which keeps long chains of scalars from nesting rules.
    """

    __slots__ = ("_known", "_rule", "kind", "shape")

    def __init__(self, shape: tuple[int, ...], kind: Kind, rule: Callable[[Indices], Node]) -> None:
        self.shape, self.kind, self._rule = shape, kind, rule
        self._known: dict[Indices, Node] = {}
        if shape == ():
            self.at(())

    def at(self, indices: Indices) -> Node:
        node = self._known.get(indices)
        if node is None:
            node = self._known[indices] = self._rule(indices)
        return node

    @property
    def scalar(self) -> Node:
        """The node of a 0-d array, or of an array with a single element."""
        if math.prod(self.shape) != 1:
            raise Refusal(f"expected a scalar, got an array of shape {self.shape}")
        return self.at((A.const(0),) * len(self.shape))


@attrs.frozen(eq=False)
class Scatter:
    """Zeros of shape `shape` with `value` added at `indices` for every entry."""

    shape: tuple[int, ...]
    entries: tuple[tuple[Indices, Node], ...] = ()
    kind: Kind = "float"


Value = Array | Scatter


def scalar(node: Node) -> Array:
    return Array((), node.kind, lambda _: node)


def captured(tensor_capture: Capture, shape: Sequence[int]) -> Array:
    sizes = tuple(shape)

    def at(indices: Indices) -> Node:
        return A.gather(tensor_capture, indices)

    return Array(sizes, tensor_capture.kind, at)


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(s)) + s for s in shapes]
    return tuple(next((d for d in dims if d != 1), 1) for dims in zip(*padded, strict=True))


def indexed_shape(
    shape: tuple[int, ...], indices: Sequence[tuple[int, ...] | None]
) -> tuple[int, ...]:
    """The shape of `tensor[indices]` for index tensors of the given shapes, as in numpy."""
    padded = [*indices, *[None] * (len(shape) - len(indices))]
    together = broadcast([i for i in padded if i is not None])
    place = index_place(padded)
    rest = [d for d, i in zip(shape, padded, strict=True) if i is None]
    return (*rest[:place], *together, *rest[place:])


def index_place(indices: Sequence[object]) -> int:
    """Where the indexed dimensions land: at the first of them if adjacent, else in front."""
    used = [d for d, i in enumerate(indices) if i is not None]
    return used[0] if used == list(range(used[0], used[-1] + 1)) else 0


def _project(indices: Indices, shape: tuple[int, ...]) -> Indices:
    """The indices of an operand of `shape` under broadcasting."""
    own = indices[len(indices) - len(shape) :]
    return tuple(A.const(0) if d == 1 else i for i, d in zip(own, shape, strict=True))


def elementwise(function: Callable[..., Node], kind: Kind, operands: Sequence[Array]) -> Array:
    shape = broadcast([o.shape for o in operands])

    def at(indices: Indices) -> Node:
        return function(*(o.at(_project(indices, o.shape)) for o in operands))

    return Array(shape, kind, at)


def cast(value: Value, kind: Kind) -> Value:
    if isinstance(value, Scatter) or value.kind == kind:
        return value
    return elementwise(lambda x: A.cast(x, kind), kind, [value])


def materialise(value: Value) -> Array:
    """A scatter seen as an array: an element is the sum of the entries that fall on it."""
    if isinstance(value, Array):
        return value
    entries = value.entries

    def at(indices: Indices) -> Node:
        total: Node = A.const(0.0)
        for place, node in entries:
            here = A.logical_and(*(A.equal(p, i) for p, i in zip(place, indices, strict=True)))
            total = A.add(total, A.where(here, node, 0.0))
        return total

    return Array(value.shape, "float", at)


def scatter(value: Value) -> Scatter:
    """A value seen as a sum of scattered entries (small arrays are written out)."""
    if isinstance(value, Scatter):
        return value
    if math.prod(value.shape) > 64:
        raise Refusal("a gradient with respect to a whole captured tensor, not to an element")
    cells: list[Indices] = [()]
    for size in value.shape:
        cells = [(*c, A.const(i)) for c in cells for i in range(size)]
    return Scatter(value.shape, tuple((c, value.at(c)) for c in cells))


def widen(value: Scatter, shape: tuple[int, ...]) -> Scatter:
    """A scatter broadcast to `shape`."""
    if value.shape == shape:
        return value
    array = materialise(value)
    return scatter(Array(shape, array.kind, lambda i: array.at(_project(i, array.shape))))


def add(a: Value, b: Value) -> Value:
    if isinstance(a, Array) and isinstance(b, Array):
        return elementwise(A.add, "float", (a, b))
    shape = broadcast((a.shape, b.shape))
    return Scatter(shape, widen(scatter(a), shape).entries + widen(scatter(b), shape).entries)


def scale(a: Scatter, b: Array, operation: Callable[[Node, Node], Node]) -> Scatter:
    """A linear operation of a scatter with an array: elementwise on the entries."""
    shape = broadcast((a.shape, b.shape))
    entries = widen(a, shape).entries
    return Scatter(shape, tuple((i, operation(v, b.at(_project(i, b.shape)))) for i, v in entries))


def reshape(a: Value, shape: tuple[int, ...]) -> Value:
    if isinstance(a, Scatter):
        return Scatter(shape, tuple((_reindex(i, a.shape, shape), v) for i, v in a.entries))
    old, at = a.shape, a.at
    return Array(shape, a.kind, lambda i: at(_reindex(i, shape, old)))


def _reindex(indices: Indices, old: tuple[int, ...], new: tuple[int, ...]) -> Indices:
    """Indices into shape `old` turned into indices into shape `new` of the same elements."""
    squeezed = [(i, d) for i, d in zip(indices, old, strict=True) if d != 1]
    if [d for _, d in squeezed] == [d for d in new if d != 1]:
        kept = iter(i for i, _ in squeezed)
        return tuple(A.const(0) if d == 1 else next(kept) for d in new)
    flat: Node = A.const(0)
    for index, size in zip(indices, old, strict=True):
        flat = A.add(A.mul(flat, size), index)
    result: list[Node] = []
    for size in reversed(new):
        result.append(A.mod(flat, size))
        flat = A.floordiv(flat, size)
    return tuple(reversed(result))
