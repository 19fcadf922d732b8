"""The correctness matrix: one rich variant over head dims, lengths, GQA groups and dtypes.

Causal, sliding window, learned ALiBi and softcap, forward and backward, against the float64 oracle
with twice the error of plain torch. By default a covering selection runs: every pair of lengths
with every dtype and (where affordable) every group, every head dim with every dtype and group. The
rest of the product:

    pytest tests/matrix -m sweep
"""

from __future__ import annotations

import itertools

import pytest

from fa4core.testing import Case, LayoutSpec, Shape, assert_case_correct

DIMS = (8, 16, 40, 64, 72, 128, 192, 256)
LENGTHS = (1, 7, 63, 64, 65, 127, 128, 129, 1000, 2046)
GROUPS = (1, 3, 8)
DTYPES = ("float32", "bfloat16", "float16")
MORE_QUERIES = ((7, 1), (65, 64), (128, 7), (129, 63), (1000, 127), (2046, 65))
FEWER_QUERIES = ((1, 129), (7, 65), (63, 128), (64, 1000), (127, 1000), (1, 2046))
ZERO = ((0, 64), (65, 0), (0, 0))
PAIRS = (*((n, n) for n in LENGTHS), *MORE_QUERIES, *FEWER_QUERIES, *ZERO)

#: Score elements of a call in the default selection: larger groups only where they are affordable.
AFFORDABLE = 2046 * 2046


def variant(heads: int) -> str:
    return (
        "Variant(mask=mask.causal() & mask.sliding_window(100), "
        f"score=score.alibi(normal(0, {heads}, std=0.1)) >> score.softcap(30.0))"
    )


def case(pair: tuple[int, int], dim: int, group: int, dtype: str, dim_v: int | None = None) -> Case:
    shape = Shape(pair[:1], pair[1:], group, 1, dim, dim if dim_v is None else dim_v)
    return Case(variant(group), shape, dtype=dtype, seed=dim + group)


def selection() -> list[tuple[tuple[int, int], int, int, str]]:
    """Rows (lengths, head dim, group, dtype) that cover the pairs the module names."""
    rows = []
    for i, pair in enumerate(PAIRS):
        for j, dtype in enumerate(DTYPES):
            group = GROUPS[(i + j) % 3]
            if pair[0] * pair[1] * group > AFFORDABLE:
                group = 1
            rows.append((pair, DIMS[(3 * i + j) % len(DIMS)], group, dtype))
    return rows


def names(rows) -> list[str]:
    return [f"{m}x{n}-d{d}-group{g}-{t}" for (m, n), d, g, t in rows]


SELECTION = selection()


def test_selection_covers():
    assert {(p, t) for p, _, _, t in SELECTION} == set(itertools.product(PAIRS, DTYPES))
    assert {(d, t) for _, d, _, t in SELECTION} == set(itertools.product(DIMS, DTYPES))
    assert {(d, g) for _, d, g, _ in SELECTION} == set(itertools.product(DIMS, GROUPS))
    affordable = {(p, g) for p in PAIRS for g in GROUPS if p[0] * p[1] * g <= AFFORDABLE}
    assert {(p, g) for p, _, g, _ in SELECTION} >= affordable


@pytest.mark.parametrize(("pair", "dim", "group", "dtype"), SELECTION, ids=names(SELECTION))
def test_covering(pair, dim, group, dtype):
    assert_case_correct(case(pair, dim, group, dtype))


OTHER_DIMS = ((64, 128), (192, 128), (40, 8), (8, 72), (16, 256))


@pytest.mark.parametrize(("dim", "dim_v"), OTHER_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_another_head_dim(dim, dim_v, dtype):
    assert_case_correct(case((65, 129), dim, 3, dtype, dim_v))


RAGGED = Shape((65, 0, 1, 130, 7), (64, 9, 0, 200, 129), 6, 2, 40, 24)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["seqused", "varlen", "varlen_seqused", "paged", "paged_varlen"])
def test_ragged_layouts(kind, dtype):
    layout = LayoutSpec(kind, page_size=16, slack=5)
    assert_case_correct(Case(variant(6), RAGGED, layout, dtype))


FULL = [row for row in itertools.product(PAIRS, DIMS, GROUPS, DTYPES) if row not in SELECTION]


@pytest.mark.sweep
@pytest.mark.parametrize(("pair", "dim", "group", "dtype"), FULL, ids=names(FULL))
def test_full_product(pair, dim, group, dtype):
    assert_case_correct(case(pair, dim, group, dtype))
