"""Every rule on ranges contains what the operation yields on values inside, in float32 as well."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fa4core.lowering.range_rules import apply
from fa4core.lowering.ranges import UNBOUNDED, Range
from primitives.expr import algebra as A
from primitives.expr.rebuild import OPERATIONS

RNG = np.random.default_rng(0)
CASES, POINTS = 400, 40

INT = {
    "floordiv": np.floor_divide,
    "mod": np.mod,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "bitand": np.bitwise_and,
    "bitor": np.bitwise_or,
    "bitxor": np.bitwise_xor,
}
FLOAT = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "mod": torch.remainder,
    "min": torch.minimum,
    "max": torch.maximum,
    "pow": torch.pow,
    "atan2": torch.atan2,
}


@pytest.fixture(autouse=True)
def _no_warnings():
    with np.errstate(all="ignore"):
        yield


def boxes(low: float, high: float, integer: bool) -> tuple[Range, np.ndarray]:
    """Random ranges, some of them single points, and random points inside each."""
    ends = np.sort(RNG.uniform(low, high, (2, CASES)), axis=0)
    ends[1, ::4] = ends[0, ::4]
    if integer:
        ends = np.rint(ends).astype(np.int64)
        points = RNG.integers(ends[0], ends[1] + 1, (POINTS, CASES))
    else:
        ends = ends.astype(np.float32).astype(np.float64)
        share = RNG.uniform(0, 1, (POINTS, CASES))
        points = np.clip(ends[0] + (ends[1] - ends[0]) * share, ends[0], ends[1])
        points = np.clip(points.astype(np.float32).astype(np.float64), ends[0], ends[1])
    points[0], points[1] = ends
    return Range(ends[0], ends[1]), points


def assert_contains(r: Range, values: np.ndarray) -> None:
    known = ~np.isnan(np.asarray(r.lo, float))
    lo, hi = np.broadcast_to(r.lo, values.shape[1:]), np.broadcast_to(r.hi, values.shape[1:])
    assert (values >= lo)[:, known].all()
    assert (values <= hi)[:, known].all()
    assert not np.isnan(values[:, known].astype(float)).any()


@pytest.mark.parametrize("span", [(-6, 6), (0, 40), (-3000, 2000), (3, 9)], ids=str)
@pytest.mark.parametrize("op", INT)
def test_integers(op: str, span: tuple[int, int]) -> None:
    (a, x), (b, y) = boxes(*span, integer=True), boxes(-9, 12, integer=True)
    if op in ("floordiv", "mod"):
        zero = (b.lo <= 0) & (b.hi >= 0)  # dividing by 0 is the user's error: nothing is promised
        y = np.where(y == 0, 1, y)
        got = apply(op, "int", None, (a, b))
        assert (got.lo[zero] == -UNBOUNDED).all()
    else:
        got = apply(op, "int", None, (a, b))
    assert_contains(got, INT[op](x, y))


@pytest.mark.parametrize("divisor", [1, 2, 7, 128, -5])
@pytest.mark.parametrize("op", ["floordiv", "mod"])
def test_constant_divisors_are_exact(op: str, divisor: int) -> None:
    for lo in range(-20, 20):
        for hi in range(lo, lo + 14):
            got = apply(
                op, "int", None, (Range(np.array([lo]), np.array([hi])), Range(np.int64(divisor)))
            )
            values = INT[op](np.arange(lo, hi + 1), divisor)
            wraps = lo // divisor != hi // divisor
            assert got.lo[0] <= values.min() and got.hi[0] >= values.max()
            if op == "floordiv" or not wraps:
                assert (got.lo[0], got.hi[0]) == (values.min(), values.max())


@pytest.mark.parametrize("op", ["bitshl", "bitshr"])
def test_shifts(op: str) -> None:
    (a, x), (b, y) = boxes(-500, 500, integer=True), boxes(0, 9, integer=True)
    operation = np.left_shift if op == "bitshl" else np.right_shift
    assert_contains(apply(op, "int", None, (a, b)), operation(x, y))


@pytest.mark.parametrize("power", [2, 3])
def test_powers_of_one_factor(power: int) -> None:
    a, x = boxes(-8, 8, integer=True)
    got = apply("mul", "int", None, (a,) * power)
    assert_contains(got, x**power)
    if power == 2:
        assert (np.asarray(got.lo) >= 0).all()


def test_overflow_is_unknown() -> None:
    huge = Range(np.array([1 << 40]))
    for got in (
        apply("mul", "int", None, (huge, huge)),
        apply("linear", "int", ((1 << 30,), 5), (huge,)),
        apply("bitshl", "int", None, (huge, Range(np.array([40])))),
    ):
        assert got.lo[0] == -UNBOUNDED and got.hi[0] == UNBOUNDED
    unbounded = Range(np.array([-UNBOUNDED]), np.array([UNBOUNDED]))
    for op in ("floordiv", "mod", "bitshr"):
        got = apply(op, "int", None, (unbounded, Range(np.array([3]))))
        assert got.lo[0] == -UNBOUNDED or (op == "mod" and got.hi[0] == UNBOUNDED)
    got = apply("float", "float", None, (unbounded,))
    assert not (got.lo[0] > -math.inf) and not (got.hi[0] < math.inf)


@pytest.mark.parametrize("span", [(-3, 3), (0.01, 5), (-200, 100)], ids=str)
@pytest.mark.parametrize("op", FLOAT)
def test_floats(op: str, span: tuple[float, float]) -> None:
    (a, x), (b, y) = boxes(*span, integer=False), boxes(-2, 5, integer=False)
    got = apply(op, "float", None, (a, b))
    for dtype in (torch.float64, torch.float32):
        values = FLOAT[op](torch.from_numpy(x).to(dtype), torch.from_numpy(y).to(dtype))
        assert_contains(got, values.double().numpy())


@pytest.mark.parametrize("span", [(-0.9, 0.9), (0.01, 5), (-40, 30)], ids=str)
@pytest.mark.parametrize("op", sorted(A.UNARY))
def test_functions(op: str, span: tuple[float, float]) -> None:
    a, x = boxes(*span, integer=False)
    got = apply(op, "float", None, (a,))
    for dtype in (torch.float64, torch.float32):
        values = getattr(torch, op)(torch.from_numpy(x).to(dtype)).double().numpy()
        assert_contains(got, values)


@pytest.mark.parametrize("op", sorted(A.UNARY))
def test_functions_are_sharp_at_points(op: str) -> None:
    """A rule that says nothing is sound too; at a point every function must say something."""
    point = Range(np.array([0.375]))
    got = apply(op, "float", None, (point,))
    value = float(getattr(torch, op)(torch.tensor(0.375, dtype=torch.float64)))
    assert got.lo[0] <= value <= got.hi[0]
    assert got.hi[0] - got.lo[0] <= 1e-5 * max(1, abs(value))


def test_float_points_that_float32_holds_stay_exact() -> None:
    a, b = Range(np.array([300.0])), Range(np.array([100.0]))
    for op, value in (("div", 3.0), ("mul", 30000.0), ("add", 400.0), ("mod", 0.0)):
        got = apply(op, "float", None, (a, b))
        assert got.lo[0] == got.hi[0] == value
    third = apply("div", "float", None, (Range(np.array([1.0])), Range(np.array([3.0]))))
    assert third.lo[0] < np.float32(1) / np.float32(3) < third.hi[0] or third.lo[0] < third.hi[0]


NAN = Range(np.array([np.nan]))
ONE = Range(np.array([1.0]))


@pytest.mark.parametrize("op", ["le", "lt", "eq"])
def test_comparisons_with_nan_are_unknown(op: str) -> None:
    for pair in ((NAN, ONE), (ONE, NAN)):
        got = apply(op, "bool", None, pair)
        assert not got.lo[0] and got.hi[0]


def test_nan_spreads() -> None:
    for op in ("add", "sub", "mul", "div", "min", "max", "pow", "atan2", "mod"):
        got = apply(op, "float", None, (NAN, ONE))
        assert np.isnan(got.lo[0]) and np.isnan(got.hi[0]), op
    got = apply("int", "int", None, (NAN,))
    assert got.lo[0] == -UNBOUNDED
    around_zero, infinite = Range(np.array([-1.0]), np.array([1.0])), Range(np.array([np.inf]))
    assert np.isnan(apply("mul", "float", None, (around_zero, infinite)).lo[0])
    assert np.isnan(apply("mod", "float", None, (infinite, ONE)).lo[0])
    assert np.isnan(apply("sub", "float", None, (infinite, infinite)).lo[0])


@pytest.mark.parametrize("op", ["and", "or", "xor", "eq0", "ge0", "not", "where"])
def test_logic(op: str) -> None:
    """All three-valued inputs, against all values they stand for."""
    bits = {"F": (False,), "T": (True,), "?": (False, True)}
    for p in bits.values():
        for q in bits.values():
            for r in bits.values():
                args = [Range(np.array([v[0]]), np.array([v[-1]])) for v in (p, q, r)]
                if op in ("eq0", "ge0"):
                    got = apply(op, "bool", None, (Range(args[0].lo - 1 + 0, args[0].hi + 0),))
                    values = {v >= 0 if op == "ge0" else v == 0 for v in range(p[0] - 1, p[-1] + 1)}
                elif op == "not":
                    got, values = apply(op, "bool", None, args[:1]), {not x for x in p}
                elif op == "where":
                    got = apply(op, "bool", None, args)
                    values = {y if x else z for x in p for y in q for z in r}
                else:
                    got = apply(op, "bool", None, args[:2])
                    function = {"and": min, "or": max, "xor": lambda x: x[0] != x[1]}[op]
                    values = {bool(function((x, y))) for x in p for y in q}
                assert bool(got.lo[0]) == min(values) and bool(got.hi[0]) == max(values)


def test_every_operation_of_the_algebra_has_a_rule() -> None:
    """Operations without a rule would be sound but say nothing: none is forgotten."""
    point, truth = Range(np.array([3])), Range(np.array([True]))
    kinds = {"float": Range(np.array([0.5])), "int": point, "bool": truth}
    signature = {
        "floordiv": ("int", "int int"),
        "mod": ("int", "int int"),
        "abs": ("int", "int"),
        "int": ("int", "float"),
        "float": ("float", "int"),
        "ge0": ("bool", "int"),
        "eq0": ("bool", "int"),
        "le": ("bool", "float float"),
        "lt": ("bool", "float float"),
        "eq": ("bool", "float float"),
        "not": ("bool", "bool"),
        "and": ("bool", "bool bool"),
        "or": ("bool", "bool bool"),
        "where": ("int", "bool int int"),
    }
    for op in OPERATIONS:
        kind, given = signature.get(op, ("float", "float" if op == "neg" else "float float"))
        got = apply(op, kind, None, [kinds[g] for g in given.split()])
        assert float(got.hi[0]) - float(got.lo[0]) < 1e-4, op
