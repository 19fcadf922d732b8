"""Bounds of a mask or score graph over boxes of queries and keys.

A `Program` splits a graph where it starts to depend on both the query and the key index. Below the
split are *leaves*, functions of one index (and of batch, head and lengths): whoever evaluates the
program supplies their ranges, for instance exact minima and maxima over a tile. Above it, the steps
combine ranges by the rules of `ranges`. Operands of one axis are regrouped first (`q - f(q) - k`
has the leaves `q - f(q)` and `k`), so that only genuine dependence on both indices is approximated.

Used by the tile classification and by `explain`. Also answers which captured tensors may be indexed
outside their shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np

from fa4core.lowering.range_rules import apply
from fa4core.lowering.ranges import Array, Range, constant, unknown
from fa4core.lowering.tables import Tables
from primitives.expr import Capture, Node, walk
from primitives.expr import algebra as A

#: Which of the two index axes a node depends on: "", "q", "k" or "qk".
Axes = str

_REGROUPED = ("linear", "and", "or", "xor", "min", "max", "mul")
_SCRAMBLING = ("gather", "mod", "bitand", "bitor", "bitxor", "where")  # not monotonic in an index


def axes_of(node: Node) -> Axes:
    return ("q" if "q" in node.free else "") + ("k" if "k" in node.free else "")


@attrs.frozen(eq=False)
class Step:
    """`node` is `op` of `args`, which are nodes evaluated before."""

    node: Node
    op: str
    attr: object
    args: tuple[Node, ...]


@attrs.frozen(eq=False)
class Program:
    """Roots as steps over leaves. `leaves[axes]` for axes "", "q" and "k".

    `equalities` maps an `eq0` node to the two leaves (of q, of k) whose equality it is: where no
    value occurs on both sides the node is false, which ranges alone may not show.
    """

    roots: tuple[Node, ...]
    steps: tuple[Step, ...]
    leaves: Mapping[Axes, tuple[Node, ...]]
    equalities: Mapping[Node, tuple[Node, Node]]


def split(*roots: Node) -> Program:
    """The program of a graph, its leaves being the largest subgraphs of at most one axis."""
    leaves: dict[Axes, dict[Node, None]] = {"": {}, "q": {}, "k": {}}
    steps: list[Step] = []
    equalities: dict[Node, tuple[Node, Node]] = {}
    for node in walk(*roots):
        if axes_of(node) != "qk":
            continue
        step = _regroup(node)
        steps.append(step)
        for arg in step.args:
            if axes_of(arg) != "qk":
                leaves[axes_of(arg)].setdefault(arg)
        sides = _sides(node)
        if sides is not None:
            equalities[node] = sides
    for root in roots:
        if axes_of(root) != "qk":
            leaves[axes_of(root)].setdefault(root)
    return Program(roots, tuple(steps), {a: tuple(n) for a, n in leaves.items()}, equalities)


def _regroup(node: Node) -> Step:
    """The node as a step, with operands of one axis gathered into one operand."""
    scrambled = node.op == "mul" and node.kind == "float"  # float products are not reassociated
    if node.op not in _REGROUPED or scrambled:
        return Step(node, node.op, node.attr, node.args)
    if node.op == "linear":
        return _regroup_linear(node)
    groups: dict[Axes, list[Node]] = {"": [], "q": [], "k": [], "qk": []}
    for arg in node.args:
        groups[axes_of(arg)].append(arg)
    args = [_joined(node.op, groups[a]) for a in ("", "q", "k") if groups[a]] + groups["qk"]
    return Step(node, node.op, node.attr, tuple(args))


def _joined(op: str, args: Sequence[Node]) -> Node:
    if op in ("and", "or"):
        return (A.logical_and if op == "and" else A.logical_or)(*args)
    if op in ("min", "max"):
        return A.extremum(op, *args)
    result = args[0]
    for arg in args[1:]:
        result = (A.mul if op == "mul" else A.logical_xor)(result, arg)
    return result


def _regroup_linear(node: Node) -> Step:
    coefficients, offset = node.attr
    groups: dict[Axes, dict[Node, int]] = {"": {}, "q": {}, "k": {}, "qk": {}}
    for coefficient, arg in zip(coefficients, node.args, strict=True):
        groups[axes_of(arg)][arg] = coefficient
    terms: list[tuple[Node, int]] = []
    for axes, group in groups.items():
        if axes == "qk" or len(group) == 1:
            terms += group.items()
        elif group:
            terms.append((A.linear(group), 1))
    return Step(node, "linear", (tuple(c for _, c in terms), offset), tuple(t for t, _ in terms))


def _sides(node: Node) -> tuple[Node, Node] | None:
    """For an equality of something of q with something of k: the two sides."""
    if node.op != "eq0" or node.args[0].op != "linear":
        return None
    form = node.args[0]
    coefficients, offset = form.attr
    query: dict[Node, int] = {}
    key: dict[Node, int] = {}
    for coefficient, arg in zip(coefficients, form.args, strict=True):
        if axes_of(arg) == "qk":
            return None
        if axes_of(arg) == "k":
            key[arg] = -coefficient
        else:
            query[arg] = coefficient
    left, right = A.linear(query), A.linear(key, -offset)
    if not any(n.op in _SCRAMBLING for n in walk(left, right)):
        return None  # both sides are monotonic: their ranges say as much
    return left, right


def plain(*roots: Node) -> tuple[Step, ...]:
    """Every node below the roots as a step: to evaluate leaves from variables."""
    return tuple(Step(n, n.op, n.attr, n.args) for n in walk(*roots) if n.op != "var")


def evaluate(
    roots: Iterable[Node],
    steps: Sequence[Step],
    values: Mapping[Node, Range],
    tables: Tables,
    never_equal: Mapping[Node, Array] | None = None,
) -> list[Range]:
    """Ranges of `roots`, elementwise over the shapes of `values`, which broadcast.

    `values` holds the variables or leaves the steps start from. `never_equal` says, for `eq0`
    nodes, where their sides are known to differ.
    """
    known = dict(values)
    with np.errstate(all="ignore"):
        for step in steps:
            if step.node in known:
                continue
            if step.op == "const":
                known[step.node] = constant(step.attr)  # type: ignore[arg-type]
                continue
            args = [known[a] for a in step.args]
            if step.op == "gather":
                result = tables.gather(step.attr, args)  # type: ignore[arg-type]
            else:
                result = apply(step.op, step.node.kind, step.attr, args)
            if never_equal is not None and step.node in never_equal:
                differ = never_equal[step.node]
                result = Range(result.lo & ~differ, result.hi & ~differ)
            known[step.node] = result
    return [known[r] for r in roots]


# ----------------------------------------------------------------------------- index checks

_CHUNK = 1 << 16


def possible_out_of_range(
    root: Node,
    batch: int,
    heads: int,
    seqlens_q: Sequence[int],
    seqlens_k: Sequence[int],
) -> list[tuple[Capture, int, int, int]]:
    """Captured tensors that may be indexed outside their shape: (capture, dim, lo, hi).

    `lo` and `hi` bound the index over the whole problem; an index is reported if they leave
    `[-size, size - 1]`. Indices of one axis are evaluated exactly; an index of both q and k is
    bounded, so that a report may be a false alarm (never the reverse). An index that only a
    discarded side of `where` or `&` uses counts too: torch evaluates both sides.
    """
    tables = Tables()
    found = []
    for node in walk(root):
        if node.op != "gather":
            continue
        shape = tables.array(node.attr).shape
        for dim, (index, size) in enumerate(zip(node.args, shape, strict=True)):
            lo, hi = span(index, batch, heads, seqlens_q, seqlens_k, tables)
            if lo <= hi and (lo < -size or hi >= size):
                found.append((node.attr, dim, lo, hi))
    return list(dict.fromkeys(found))


def span(
    node: Node,
    batch: int,
    heads: int,
    seqlens_q: Sequence[int],
    seqlens_k: Sequence[int],
    tables: Tables,
) -> tuple[int, int]:
    """The least and greatest value of an integer node over a problem; (1, 0) if it is empty."""
    program = split(node)
    cases = [
        (b, h, q, k)
        for b, (q, k) in enumerate(zip(seqlens_q, seqlens_k, strict=True))
        for h in range(heads if "h" in node.free else min(heads, 1))
        if q > 0 and k > 0
    ]
    if not node.free & {"b", "seqlen_q", "seqlen_k"} and axes_of(node) != "qk":
        cases.sort(key=lambda case: case[2 if axes_of(node) == "q" else 3])
        cases = list({h: (b, h, q, k) for b, h, q, k in cases}.values())  # the longest covers all
    least, greatest = 1, 0
    for b, h, q, k in cases:
        fixed = {"b": b, "h": h, "seqlen_q": q, "seqlen_k": k}
        values: dict[Node, Range] = {}
        for axis, leaves in program.leaves.items():
            values |= _extremes(leaves, axis, {"q": q, "k": k}.get(axis, 1), fixed, tables)
        (r,) = evaluate(program.roots, program.steps, values, tables)
        lo, hi = int(np.min(r.lo)), int(np.max(r.hi))
        empty = least > greatest
        least, greatest = (lo, hi) if empty else (min(least, lo), max(greatest, hi))
    return least, greatest


def _extremes(
    leaves: Sequence[Node], axis: Axes, length: int, fixed: Mapping[str, int], tables: Tables
) -> dict[Node, Range]:
    """Minimum and maximum of leaves of one axis over a whole sequence."""
    steps = plain(*leaves)
    found: dict[Node, Range] = {}
    variables = {A.var(n): constant(v) for n, v in fixed.items()}
    variables[A.var("score")] = unknown("float", ())
    for start in range(0, length if leaves else 0, _CHUNK):
        points = np.arange(start, min(start + _CHUNK, length))
        values = variables | ({A.var(axis): Range(points)} if axis else {})
        for leaf, r in zip(leaves, evaluate(leaves, steps, values, tables), strict=True):
            lo, hi = np.min(r.lo), np.max(r.hi)
            if leaf in found:
                lo, hi = np.minimum(lo, found[leaf].lo), np.maximum(hi, found[leaf].hi)
            found[leaf] = Range(lo, hi)
    return found
