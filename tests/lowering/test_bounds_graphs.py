"""Bounds of whole graphs: random expressions, regrouping by axis, and checks of indices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fa4core.lowering.bounds import axes_of, evaluate, plain, possible_out_of_range, split
from fa4core.lowering.ranges import Range
from fa4core.lowering.tables import Tables
from fa4core.plan.tiles import EMPTY, FULL, tile_map
from primitives.expr import Capture, Node, walk
from primitives.expr import algebra as A
from primitives.expr.trace import trace

Q, K, B, H = (A.var(n) for n in ("q", "k", "b", "h"))
LENGTH_Q, LENGTH_K, BATCH, HEADS = 23, 30, 2, 2

_GENERATOR = torch.Generator().manual_seed(0)
TABLES = [
    torch.randint(-4, 40, (30,), generator=_GENERATOR),
    torch.arange(30) // 4,
    torch.rand(30, generator=_GENERATOR),
    torch.rand(7, 9, generator=_GENERATOR) < 0.4,
    torch.randint(0, 6, (2, 30), generator=_GENERATOR),
]
CAPTURES = [Capture(t) for t in TABLES]


def small(node: Node, size: int) -> Node:
    """An index of a table, mostly inside."""
    return A.extremum("min", A.extremum("max", node, -size), size - 1)


def gathers(index: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    return st.one_of(
        st.builds(lambda i: A.gather(CAPTURES[0], [small(i, 30)]), index),
        st.builds(lambda i: A.gather(CAPTURES[1], [A.mod(i, 30)]), index),
        st.builds(lambda i: A.gather(CAPTURES[4], [H, small(i, 30)]), index),
    )


leaves = st.one_of(st.sampled_from([Q, K, Q, K, H, B]), st.integers(-40, 40).map(A.const))
sizes = st.sampled_from([2, 3, 5, 8, 16, -4])


def grow_int(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    return st.one_of(
        st.builds(A.add, inner, inner),
        st.builds(A.sub, inner, inner),
        st.builds(A.mul, inner, st.integers(-3, 3)),
        st.builds(A.mul, inner, inner),
        st.builds(A.floordiv, inner, sizes),
        st.builds(A.mod, inner, sizes),
        st.builds(A.absolute, inner),
        st.builds(A.extremum, st.sampled_from(["min", "max"]), inner, inner),
        st.builds(A.bitwise, st.sampled_from(["and", "or", "xor"]), inner, inner),
        st.builds(lambda c, a, b: A.where(A.less(c, 3), a, b), inner, inner, inner),
        gathers(inner),
    )


ints = st.recursive(leaves, grow_int, max_leaves=6)
floats = st.one_of(
    ints.map(A.to_float),
    st.builds(lambda i: A.unary("exp", A.div(A.neg(A.to_float(A.absolute(i))), 9.0)), ints),
    st.builds(lambda i: A.unary("tanh", A.mul(A.to_float(i), 0.1)), ints),
    st.builds(lambda i, j: A.div(A.to_float(i), A.to_float(j)), ints, ints),
    st.builds(lambda i: A.unary("sqrt", A.to_float(i)), ints),
    st.builds(lambda i: A.gather(CAPTURES[2], [small(i, 30)]), ints),
)
comparisons = st.one_of(
    st.builds(A.less, ints, ints),
    st.builds(A.less_equal, ints, ints),
    st.builds(A.equal, ints, ints),
    st.builds(A.less, floats, floats),
    st.builds(A.less_equal, floats, floats),
    st.builds(lambda i, j: A.gather(CAPTURES[3], [small(i, 7), small(j, 9)]), ints, ints),
)
masks = st.recursive(
    comparisons,
    lambda inner: st.one_of(
        st.builds(A.logical_and, inner, inner),
        st.builds(A.logical_or, inner, inner),
        st.builds(A.logical_xor, inner, inner),
        st.builds(A.logical_not, inner),
        st.builds(A.where, inner, inner, inner),
    ),
    max_leaves=5,
)

NUMPY = {
    "add": np.add, "sub": np.subtract, "neg": np.negative, "div": np.divide, "abs": np.abs,
    "floordiv": np.floor_divide, "mod": np.mod, "exp": np.exp, "tanh": np.tanh, "sqrt": np.sqrt,
    "ge0": lambda x: x >= 0, "eq0": lambda x: x == 0, "le": np.less_equal, "lt": np.less,
    "eq": np.equal, "not": np.logical_not, "where": np.where,
    "bitand": np.bitwise_and, "bitor": np.bitwise_or, "bitxor": np.bitwise_xor,
    "int": lambda x: np.trunc(x).astype(np.int64),
}  # fmt: skip
REDUCED = {
    "min": np.minimum, "max": np.maximum, "and": np.logical_and, "or": np.logical_or,
    "xor": np.logical_xor, "mul": np.multiply,
}  # fmt: skip


def meaning(root: Node, variables: dict[str, np.ndarray], dtype: type) -> np.ndarray:
    """What a graph means, element by element: written apart from the analysis."""
    known: dict[Node, np.ndarray] = {}
    for n in walk(root):
        args = [known[a] for a in n.args]
        if n.op == "const":
            known[n] = np.asarray(n.attr if n.kind != "float" else dtype(n.attr))
        elif n.op == "var":
            known[n] = variables[n.attr]
        elif n.op == "linear":
            known[n] = sum((c * a for c, a in zip(n.attr[0], args, strict=True)), n.attr[1])
        elif n.op == "gather":
            value = n.attr.tensor.numpy()[tuple(args)]
            known[n] = value.astype(dtype) if n.kind == "float" else value
        elif n.op == "float":
            known[n] = np.asarray(args[0]).astype(dtype)
        elif n.op in REDUCED:
            result = args[0]
            for a in args[1:]:
                result = REDUCED[n.op](result, a)
            known[n] = result
        else:
            known[n] = np.asarray(NUMPY[n.op](*args))
    return known[root]


def truth(root: Node, dtype: type) -> np.ndarray:
    """(batch, heads, queries, keys)"""
    sizes = (BATCH, HEADS, LENGTH_Q, LENGTH_K)
    grids = np.meshgrid(*(np.arange(n) for n in sizes), indexing="ij")
    with np.errstate(all="ignore"):
        value = meaning(root, dict(zip(("b", "h", "q", "k"), grids, strict=True)), dtype)
    return np.broadcast_to(value, sizes)


@settings(max_examples=250, deadline=None)
@given(masks, st.sampled_from([(4, 8), (7, 5), (16, 16)]), st.sampled_from([0, 1000, 1 << 20]))
def test_tile_maps_of_random_masks_are_sound(
    mask: Node, tile: tuple[int, int], budget: int
) -> None:
    tiles = tile_map(
        mask,
        batch=BATCH,
        heads=HEADS,
        seqlens_q=[LENGTH_Q] * BATCH,
        seqlens_k=[LENGTH_K] * BATCH,
        tile_q=tile[0],
        tile_k=tile[1],
        exact_budget=budget,
    )
    has_floats = any(n.kind == "float" for n in walk(mask))
    for dtype in (np.float64, np.float32) if has_floats else (np.float64,):
        values = truth(mask, dtype)
        for b, h in np.ndindex(BATCH, HEADS):
            dense = tiles.dense(b, h)
            for i, j in np.ndindex(dense.shape):
                rows = slice(i * tile[0], (i + 1) * tile[0])
                columns = slice(j * tile[1], (j + 1) * tile[1])
                inside = values[b, h, rows, columns]
                assert dense[i, j] != EMPTY or not inside.any()
                assert dense[i, j] != FULL or inside.all()
                if budget == 1 << 20 and not has_floats:  # everything could be decided
                    assert dense[i, j] == (FULL if inside.all() else int(inside.any()))


@settings(max_examples=150, deadline=None)
@given(ints, st.integers(0, 20), st.integers(0, 12), st.integers(0, 20), st.integers(0, 12))
def test_bounds_over_boxes_of_random_graphs(
    node: Node, q: int, height: int, k: int, width: int
) -> None:
    """Bounds computed through the regrouped program, from the variables' own ranges."""
    program = split(node)
    box = {
        Q: Range(np.array([q]), np.array([q + height])),
        K: Range(np.array([k]), np.array([k + width])),
        B: Range(np.array([1])),
        H: Range(np.array([0])),
    }
    tables = Tables()
    values = {}
    for leaves_ in program.leaves.values():
        found = evaluate(leaves_, plain(*leaves_), box, tables)
        values |= dict(zip(leaves_, found, strict=True))
    (r,) = evaluate(program.roots, program.steps, values, tables)
    grid = np.meshgrid(np.arange(q, q + height + 1), np.arange(k, k + width + 1), indexing="ij")
    one, zero = np.ones_like(grid[0]), np.zeros_like(grid[0])
    with np.errstate(all="ignore"):
        exact = meaning(node, {"q": grid[0], "k": grid[1], "b": one, "h": zero}, np.float64)
    assert r.lo[()] <= exact.min() if np.ndim(r.lo) == 0 else r.lo.min() <= exact.min()
    assert np.max(r.hi) >= exact.max()


def test_one_axis_is_one_leaf() -> None:
    f = A.gather(CAPTURES[0], [Q])
    form = A.sub(A.add(A.sub(Q, f), A.gather(CAPTURES[1], [K])), K)
    program = split(A.less_equal(0, form))
    assert all(axes_of(n) == axes for axes, nodes in program.leaves.items() for n in nodes)
    assert [len(program.leaves[a]) for a in ("q", "k")] == [1, 1]


def test_exact_range_of_a_difference() -> None:
    """q - f(q) is bounded as one function, not as a difference of two ranges."""
    start = torch.arange(256) // 64 * 64
    node = trace(lambda b, h, q, k: k <= q - start[q], ("b", "h", "q", "k"), "mask")
    tiles = tile_map(node, batch=1, heads=1, seqlens_q=[256], seqlens_k=[256], exact_budget=0)
    assert tiles.dense(0, 0).tolist() == [[1, 0], [1, 0]]


# ----------------------------------------------------------------------------- index checks


def check(mask, batch=1, heads=1, q=(100,), k=(100,)):
    node = trace(mask, ("b", "h", "q", "k"), "mask")
    return [
        (tuple(c.tensor.shape), dim, lo, hi)
        for c, dim, lo, hi in possible_out_of_range(node, batch, heads, q, k)
    ]


def test_indices_inside_are_not_reported() -> None:
    ids, offsets = torch.arange(100) // 30, torch.tensor([0, 30, 60, 90, 100])
    assert check(lambda b, h, q, k: (ids[q] == ids[k]) & (k >= offsets[ids[q]])) == []
    assert check(lambda b, h, q, k: ids[q - 100] == 0) == []  # negative: from the end
    table = torch.zeros(199)
    assert check(lambda b, h, q, k: table[q - k + 99] > 0) == []


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        (lambda t: lambda b, h, q, k: t[q] == t[k % 50], [((50,), 0, 0, 99)]),
        (lambda t: lambda b, h, q, k: t[q // 2] == t[q - k], [((50,), 0, -99, 99)]),
        (lambda t: lambda b, h, q, k: t[h] == t[(q // 50) * 50], [((50,), 0, 0, 50)]),
    ],
)
def test_indices_outside_are_reported(mask, found) -> None:
    assert check(mask(torch.zeros(50, dtype=torch.int64))) == found


def test_batch_and_head_indices() -> None:
    table = torch.zeros(2, 3, dtype=torch.int64)
    assert check(lambda b, h, q, k: table[b, h] <= k, 2, 3, (5, 5), (5, 5)) == []
    assert check(lambda b, h, q, k: table[b, h] <= k, 3, 4, (5,) * 3, (5,) * 3) == [
        ((2, 3), 0, 0, 2),
        ((2, 3), 1, 0, 3),
    ]


def test_every_length_counts() -> None:
    table = torch.zeros(60)
    assert check(lambda b, h, q, k: table[k] > 0, 3, 1, (5, 0, 5), (50, 90, 61)) == [
        ((60,), 0, 0, 60)
    ]
    assert check(lambda b, h, q, k: table[k] > 0, 1, 1, (0,), (90,)) == []


def test_index_by_the_score_is_unknown() -> None:
    """Score mods are checked too; what the score indexes can't be bounded."""
    index = A.to_int(A.var("score"))
    ((capture, dim, lo, hi),) = possible_out_of_range(
        A.gather(Capture(TABLES[2]), [index]), 1, 1, [5], [5]
    )
    assert capture.tensor is TABLES[2] and dim == 0 and lo < -30 and hi > 30
