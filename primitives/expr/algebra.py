"""Constructors that keep the expression graph canonical.

Two spellings of one function should become one graph, so that they share one kernel:

* Integers are exact and unbounded, so sums are kept as linear forms `c0 + c1*x1 + ...`, and every
  comparison of integers becomes `linear >= 0` or `linear == 0`: `a < b`, `b > a` and
  `b - a - 1 >= 0` are one node. `~x` is `-x - 1`.
* Boolean logic is flattened, sorted and free of duplicates, with `not` pushed to the leaves.
* Floating point is not reordered (that would change roundings); only the operands of commutative
  operations are sorted.

Constants are folded. Every function takes and returns nodes; `lift` makes a node of a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from primitives.expr.node import VARIABLES, Capture, Kind, Node, walk

Number = bool | int | float


def const(value: Number) -> Node:
    """A constant: Python's `bool`, `int` or `float`, by its type."""
    if isinstance(value, bool):
        return Node("const", (), "bool", value)
    if isinstance(value, int):
        return Node("const", (), "int", value)
    value = float(value)
    return Node("const", (), "float", math.nan if math.isnan(value) else value)


TRUE, FALSE = const(True), const(False)


def lift(value: Node | Number) -> Node:
    return value if isinstance(value, Node) else const(value)


def var(name: str) -> Node:
    """One of `VARIABLES`: an index, a sequence length, the score or the scale."""
    return Node("var", (), "float" if name in ("score", "scale") else "int", name)


def gather(capture: Capture, indices: Iterable[Node | Number] = ()) -> Node:
    """`tensor[indices]`, fully indexed. Negative indices count from the end, as in torch."""
    nodes = tuple(to_int(lift(i)) for i in indices)
    if len(nodes) != capture.rank:
        raise ValueError(f"{capture} has rank {capture.rank}, indexed by {len(nodes)} indices")
    return Node("gather", nodes, capture.kind, capture)


# ------------------------------------------------------------------------------------ order


def _age(node: Node) -> tuple[int, ...]:
    """The captures below a node by age: they break ties between equal structures."""
    return tuple(n.attr.serial for n in walk(node) if n.op == "gather")


def _sorted(nodes: Iterable[Node], weights: Mapping[Node, int] | None = None) -> tuple[Node, ...]:
    """Nodes in canonical order: by structure, then by weight, at last by the age of captures.

    What captures hold must not decide: a new value of a scalar would order operands anew, and so
    compile a kernel again.
    """
    weights = weights or {}

    def rank(node: Node) -> tuple:
        place = VARIABLES.index(node.attr) if node.op == "var" else len(VARIABLES)
        return place, node.digest, weights.get(node, 0)

    nodes = list(nodes)
    keys = [rank(n) for n in nodes]
    if len(set(keys)) < len(keys):
        order = sorted(range(len(nodes)), key=lambda i: (*keys[i], _age(nodes[i])))
    else:
        order = sorted(range(len(nodes)), key=lambda i: keys[i])
    return tuple(nodes[i] for i in order)


# ------------------------------------------------------------------------- integers, linear


def _terms(node: Node) -> tuple[dict[Node, int], int]:
    if node.op == "const":
        return {}, int(node.attr)
    if node.op == "linear":
        coefficients, constant = node.attr
        return dict(zip(node.args, coefficients, strict=True)), constant
    return {node: 1}, 0


def linear(terms: Mapping[Node, int], constant: int = 0) -> Node:
    """`constant + sum(coefficient * term)` over integer nodes, in canonical form."""
    terms = {t: c for t, c in terms.items() if c}
    if not terms:
        return const(int(constant))
    if len(terms) == 1 and constant == 0:
        ((term, coefficient),) = terms.items()
        if coefficient == 1:
            return term
    args = _sorted(terms, terms)
    return Node("linear", args, "int", (tuple(terms[a] for a in args), int(constant)))


def _combine(a: Node, b: Node, sign: int) -> Node:
    terms, constant = _terms(a)
    other, other_constant = _terms(b)
    for term, coefficient in other.items():
        terms[term] = terms.get(term, 0) + sign * coefficient
    return linear(terms, constant + sign * other_constant)


def _scale(node: Node, factor: int) -> Node:
    terms, constant = _terms(node)
    return linear({t: c * factor for t, c in terms.items()}, constant * factor)


# -------------------------------------------------------------------------------- arithmetic


def _numeric(*nodes: Node | Number) -> tuple[Node, ...]:
    """Bring operands to one kind: float if any is, else int."""
    lifted = tuple(lift(n) for n in nodes)
    if any(n.kind == "float" for n in lifted):
        return tuple(to_float(n) for n in lifted)
    return tuple(to_int(n) for n in lifted)


def add(a: Node | Number, b: Node | Number) -> Node:
    a, b = _numeric(a, b)
    if a.kind == "int":
        return _combine(a, b, 1)
    if a.is_const and a.attr == 0:
        return b
    if b.is_const and b.attr == 0:
        return a
    return _fold("add", _sorted((a, b)), "float", lambda x, y: x + y)


def sub(a: Node | Number, b: Node | Number) -> Node:
    a, b = _numeric(a, b)
    if a.kind == "int":
        return _combine(a, b, -1)
    if b.is_const and b.attr == 0:
        return a
    return _fold("sub", (a, b), "float", lambda x, y: x - y)


def neg(a: Node | Number) -> Node:
    (a,) = _numeric(a)
    if a.kind == "int":
        return _scale(a, -1)
    return a.args[0] if a.op == "neg" else _fold("neg", (a,), "float", lambda x: -x)


def mul(a: Node | Number, b: Node | Number) -> Node:
    a, b = _numeric(a, b)
    if a.kind == "int":
        if a.is_const:
            return _scale(b, a.attr)
        if b.is_const:
            return _scale(a, b.attr)
        factors = [f for n in (a, b) for f in (n.args if n.op == "mul" else (n,))]
        return Node("mul", _sorted(factors), "int")
    if a.is_const and a.attr == 1:
        return b
    if b.is_const and b.attr == 1:
        return a
    return _fold("mul", _sorted((a, b)), "float", lambda x, y: x * y)


def div(a: Node | Number, b: Node | Number) -> Node:
    """True division, always float."""
    a, b = to_float(lift(a)), to_float(lift(b))
    if b.is_const and b.attr == 1:
        return a
    return _fold("div", (a, b), "float", _float_div)


def _float_div(x: float, y: float) -> float:
    if y:
        return x / y
    return math.nan if not x or math.isnan(x) else math.copysign(math.inf, x) * math.copysign(1, y)


def floordiv(a: Node | Number, b: Node | Number) -> Node:
    """Division rounded towards minus infinity, as Python's and torch's `//`."""
    a, b = _numeric(a, b)
    if a.kind == "float":
        return unary("floor", div(a, b))
    if b.is_const and b.attr == 1:
        return a
    _reject_zero(b, "//")
    return _fold("floordiv", (a, b), "int", lambda x, y: x // y)


def mod(a: Node | Number, b: Node | Number) -> Node:
    """Remainder with the sign of the divisor, as Python's and torch's `%`."""
    a, b = _numeric(a, b)
    if a.kind == "int":
        _reject_zero(b, "%")
        if b.is_const and abs(b.attr) == 1:
            return const(0)
        return _fold("mod", (a, b), "int", lambda x, y: x % y)
    if b.is_const and b.attr == 0:
        return const(math.nan)
    return _fold("mod", (a, b), "float", lambda x, y: x % y)


def _reject_zero(divisor: Node, operator: str) -> None:
    if divisor.is_const and divisor.attr == 0:
        raise ZeroDivisionError(f"integer {operator} by the constant 0")


def extremum(op: str, *nodes: Node | Number) -> Node:
    """`op` is "min" or "max"."""
    args = _numeric(*nodes)
    choose = min if op == "min" else max

    def fold(*numbers: float) -> float:
        return math.nan if any(map(math.isnan, numbers)) else choose(numbers)

    flat = [f for n in args for f in (n.args if n.op == op and n.kind == "int" else (n,))]
    unique = list(dict.fromkeys(flat))
    if unique[0].kind == "int":
        numbers = [n.attr for n in unique if n.is_const]
        unique = [n for n in unique if not n.is_const]
        if numbers:
            unique.append(const(choose(numbers)))
    if len(unique) == 1:
        return unique[0]
    return _fold(op, _sorted(unique), unique[0].kind, fold)


def absolute(a: Node | Number) -> Node:
    (a,) = _numeric(a)
    if a.op == "linear" and _leading(a) < 0:
        a = _scale(a, -1)  # |x| = |-x|: one spelling
    return _fold("abs", (a,), a.kind, abs)


_FOLD: dict[str, Callable[[float], float]] = {
    "exp": math.exp,
    "exp2": lambda x: 2.0**x,
    "expm1": math.expm1,
    "log": math.log,
    "log2": math.log2,
    "log1p": math.log1p,
    "tanh": math.tanh,
    "sin": math.sin,
    "cos": math.cos,
    "sqrt": math.sqrt,
    "erf": math.erf,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
}

#: Functions of one float argument that a graph may contain.
UNARY = frozenset({*_FOLD, "rsqrt", "sigmoid", "round", "sign", "tan", "asin", "acos", "atan"}) | {
    "sinh",
    "cosh",
    "erfc",
}


def unary(op: str, a: Node | Number) -> Node:
    """A float function of one argument, one of `UNARY`."""
    a = to_float(lift(a))
    if a.is_const and op in _FOLD:
        try:
            return const(float(_FOLD[op](a.attr)))
        except (ValueError, OverflowError):
            pass
    return Node(op, (a,), "float")


def power(a: Node | Number, b: Node | Number) -> Node:
    a, b = _numeric(a, b)
    if b.is_const and b.attr == int(b.attr) and 0 <= b.attr <= 4:
        result = const(1 if a.kind == "int" else 1.0)
        for _ in range(int(b.attr)):
            result = mul(result, a)
        return result
    return Node("pow", (to_float(a), to_float(b)), "float")


def bitwise(op: str, a: Node | Number, b: Node | Number) -> Node:
    """`op` is "and", "or", "xor", "shl" or "shr"; integers are two's complement, shr keeps sign."""
    a, b = to_int(lift(a)), to_int(lift(b))
    folds: dict[str, Callable[[int, int], int]] = {
        "and": lambda x, y: x & y,
        "or": lambda x, y: x | y,
        "xor": lambda x, y: x ^ y,
        "shl": lambda x, y: x << y,
        "shr": lambda x, y: x >> y,
    }
    args = (a, b) if op in ("shl", "shr") else _sorted((a, b))
    if op == "shl" and b.is_const and 0 <= b.attr < 62:
        return _scale(a, 1 << b.attr)
    if op == "shr" and b.is_const and 0 <= b.attr < 62:
        return floordiv(a, 1 << b.attr)
    return _fold(f"bit{op}", args, "int", folds[op])


def bitnot(a: Node | Number) -> Node:
    return _combine(_scale(to_int(lift(a)), -1), const(1), -1)


# ------------------------------------------------------------------------------------- casts


def to_float(a: Node) -> Node:
    if a.kind == "float":
        return a
    return const(float(a.attr)) if a.is_const else Node("float", (a,), "float")


def to_int(a: Node) -> Node:
    """Floats are truncated towards zero; booleans become 0 and 1."""
    if a.kind == "int":
        return a
    if a.is_const and (a.kind == "bool" or math.isfinite(a.attr)):
        return const(int(a.attr))
    if a.kind == "bool" and _is_negation(a):
        return sub(1, to_int(logical_not(a)))
    return Node("int", (a,), "int")


def to_bool(a: Node) -> Node:
    return a if a.kind == "bool" else logical_not(equal(a, const(0)))


def cast(a: Node, kind: Kind) -> Node:
    return {"bool": to_bool, "int": to_int, "float": to_float}[kind](a)


# ------------------------------------------------------------------------------- comparisons


def _nonnegative(a: Node) -> Node:
    """`a >= 0` for an integer node, coefficients divided by their greatest common divisor."""
    terms, constant = _terms(a)
    if not terms:
        return const(constant >= 0)
    divisor = math.gcd(*terms.values())
    reduced = linear({t: c // divisor for t, c in terms.items()}, constant // divisor)
    return Node("ge0", (reduced,), "bool")


def less_equal(a: Node | Number, b: Node | Number) -> Node:
    a, b = _numeric(a, b)
    if a.kind == "int":
        return _nonnegative(sub(b, a))
    return _fold("le", (a, b), "bool", lambda x, y: x <= y)


def less(a: Node | Number, b: Node | Number) -> Node:
    a, b = _numeric(a, b)
    if a.kind == "int":
        return _nonnegative(sub(sub(b, a), 1))
    return _fold("lt", (a, b), "bool", lambda x, y: x < y)


def equal(a: Node | Number, b: Node | Number) -> Node:
    a, b = lift(a), lift(b)
    if a.kind == b.kind == "bool":
        return logical_not(logical_xor(a, b))
    a, b = _numeric(a, b)
    if a.kind == "float":
        return _fold("eq", _sorted((a, b)), "bool", lambda x, y: x == y)
    terms, constant = _terms(sub(a, b))
    if not terms:
        return const(constant == 0)
    divisor = math.gcd(*terms.values())
    if constant % divisor:
        return FALSE
    form = linear({t: c // divisor for t, c in terms.items()}, constant // divisor)
    return Node("eq0", (_scale(form, -1) if _leading(form) < 0 else form,), "bool")


# ------------------------------------------------------------------------------------- logic


def logical_not(a: Node | Number) -> Node:
    a = to_bool(lift(a))
    if a.is_const:
        return const(not a.attr)
    if a.op == "not":
        return a.args[0]
    if a.op == "ge0":  # not (x >= 0) is -x - 1 >= 0
        return _nonnegative(bitnot(a.args[0]))
    if a.op in ("and", "or"):
        return _logical("or" if a.op == "and" else "and", [logical_not(x) for x in a.args])
    return Node("not", (a,), "bool")


def logical_and(*nodes: Node | Number) -> Node:
    return _logical("and", nodes)


def logical_or(*nodes: Node | Number) -> Node:
    return _logical("or", nodes)


def _logical(op: str, nodes: Iterable[Node | Number]) -> Node:
    neutral = op == "and"
    flat: dict[Node, None] = {}
    for node in (to_bool(lift(n)) for n in nodes):
        for arg in node.args if node.op == op else (node,):
            if arg.is_const and arg.attr != neutral:
                return const(not neutral)
            if not arg.is_const:
                flat[arg] = None
    if any(logical_not(a) in flat for a in flat):
        return const(not neutral)  # x & ~x, x | ~x
    if len(flat) <= 1:
        return next(iter(flat), const(neutral))
    return Node(op, _sorted(flat), "bool")


def logical_xor(a: Node | Number, b: Node | Number) -> Node:
    negate = False
    count: dict[Node, int] = {}
    for node in (to_bool(lift(a)), to_bool(lift(b))):
        bare, flip = _without_negation(node)
        negate ^= flip
        for arg in bare.args if bare.op == "xor" else (bare,):
            if arg.is_const:
                negate ^= arg.attr
                continue
            term, flip = _without_negation(arg)
            negate ^= flip
            count[term] = count.get(term, 0) + 1
    odd = [arg for arg, times in count.items() if times % 2]
    if not odd:
        return const(negate)
    result = odd[0] if len(odd) == 1 else Node("xor", _sorted(odd), "bool")
    return logical_not(result) if negate else result


def _leading(form: Node) -> int:
    """The first coefficient of a linear form."""
    return form.attr[0][0] if form.op == "linear" else 1


def _without_negation(a: Node) -> tuple[Node, bool]:
    return (logical_not(a), True) if _is_negation(a) else (a, False)


def _is_negation(a: Node) -> bool:
    """Of a condition and its negation, exactly one is called so."""
    return a.op in ("not", "or") or (a.op == "ge0" and _leading(a.args[0]) < 0)


def where(condition: Node | Number, a: Node | Number, b: Node | Number) -> Node:
    condition, a, b = to_bool(lift(condition)), lift(a), lift(b)
    if a.kind != b.kind:
        a, b = _numeric(a, b)
    if condition.is_const:
        return a if condition.attr else b
    if a is b:
        return a
    if a.kind == "bool":
        return logical_or(logical_and(condition, a), logical_and(logical_not(condition), b))
    if _is_negation(condition):
        condition, a, b = logical_not(condition), b, a
    return Node("where", (condition, a, b), a.kind)


# ----------------------------------------------------------------------------------- helpers


def _fold(op: str, args: tuple[Node, ...], kind: Kind, evaluate: Callable[..., Any]) -> Node:
    if all(a.is_const for a in args):
        try:
            value = evaluate(*(a.attr for a in args))
            return const(float(value) if kind == "float" else value)
        except (OverflowError, ValueError):
            pass
    return Node(op, args, kind)
