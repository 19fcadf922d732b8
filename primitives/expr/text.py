"""Graphs as text: a canonical form that is a kernel's identity, and a pretty form for people.

The canonical text names captures by slot, so that it is the same for new closures, new tensors and
new scalars of the same type; it is the same in every process, and `parse` reads it back. Custom
operators carry it, and compile keys are made of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from primitives.expr.node import Capture, Kind, Node, captures, walk


def dump(roots: Sequence[Node]) -> str:
    """Canonical text of a graph with several results, one node a line, results last."""
    slots = {capture: i for i, capture in enumerate(captures(*roots))}
    names: dict[Node, int] = {}
    lines = [f"captures {' '.join(c.signature for c in slots)}".rstrip()]
    for node in walk(*roots):
        attr = slots[node.attr] if node.op == "gather" else node.attr
        args = " ".join(f"%{names[a]}" for a in node.args)
        names[node] = len(names)
        lines.append(f"{node.op}:{node.kind} ({args}) {_attr_text(attr)}".rstrip())
    lines.append("return " + " ".join(f"%{names[r]}" for r in roots))
    return "\n".join(lines)


def _attr_text(attr: object) -> str:
    if attr is None:
        return ""
    return f"float {attr.hex()}" if isinstance(attr, float) else json.dumps(attr)


def parse(text: str, tensors: Sequence[torch.Tensor] | None = None) -> tuple[Node, ...]:
    """Read `dump`'s text; slots become `tensors`, or placeholders where none are given."""
    if tensors is None:
        return _parse_placeholders(text)
    return _parse(text, tuple(Capture(t) for t in tensors))


@lru_cache(maxsize=1024)
def _parse_placeholders(text: str) -> tuple[Node, ...]:
    return _parse(text, None)


def _parse(text: str, bound: tuple[Capture, ...] | None) -> tuple[Node, ...]:
    head, *body, last = text.splitlines()
    if bound is None:
        bound = tuple(_placeholder(s) for s in head.split()[1:])
    nodes: list[Node] = []
    for line in body:
        left, _, rest = line.partition(" (")
        arg_text, _, attr_text = rest.partition(")")
        op, _, kind = left.partition(":")
        attr_text = attr_text.strip()
        if attr_text.startswith("float "):
            attr: object = float.fromhex(attr_text.removeprefix("float "))
        else:
            attr = _frozen(json.loads(attr_text)) if attr_text else None
        if op == "gather":
            attr = bound[int(attr_text)]
        args = [nodes[int(a[1:])] for a in arg_text.split()]
        nodes.append(Node(op, args, _kind(kind), attr))
    return tuple(nodes[int(r[1:])] for r in last.split()[1:])


def _frozen(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _kind(text: str) -> Kind:
    if text not in ("bool", "int", "float"):
        raise ValueError(f"not a kind: {text!r}")
    return text  # type: ignore[return-value]


def _placeholder(signature: str) -> Capture:
    dtype, _, rank = signature.removesuffix("]").partition("[")
    return Capture.placeholder(getattr(torch, dtype), int(rank))


# ------------------------------------------------------------------------------------ pretty

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%"} | {
    "le": "<=",
    "lt": "<",
    "eq": "==",
    "and": "&",
    "or": "|",
    "xor": "^",
    "bitand": "&",
    "bitor": "|",
    "bitxor": "^",
    "bitshl": "<<",
    "bitshr": ">>",
}


def pretty(node: Node, limit: int = 400) -> str:
    """A Python-like spelling, cut to `limit` characters."""
    memo: dict[Node, str] = {}
    for n in walk(node):
        if n.op in ("ge0", "eq0"):
            form = n.args[0]
            memo[n] = _comparison(
                n, [memo[a] for a in (form.args if form.op == "linear" else [form])]
            )
        else:
            memo[n] = _spell(n, [memo[a] for a in n.args])
        if len(memo[n]) > limit:
            memo[n] = memo[n][: limit - 3] + "..."
    return _bare(memo[node])


def _bare(text: str) -> str:
    """Drop one pair of parentheses around the whole text."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0 and i < len(text) - 1:
            return text
    return text[1:-1]


def _spell(node: Node, args: list[str]) -> str:
    op = node.op
    if op == "const":
        return repr(node.attr)
    if op == "var":
        return {"q": "q_idx", "k": "kv_idx"}.get(node.attr, node.attr)
    if op == "gather":
        if node.attr.rank == 0:
            return repr(node.attr)
        return f"{node.attr.signature}[{', '.join(_bare(a) for a in args)}]"
    if op == "linear":
        return _side(node, args)
    if op == "not":
        return f"~{args[0]}"
    if op == "neg":
        return f"-{args[0]}"
    if op in _INFIX:
        return "(" + f" {_INFIX[op]} ".join(args) + ")"
    return f"{op}({', '.join(_bare(a) for a in args)})"


def _sum(terms: list[tuple[str, int]], constant: int) -> str:
    parts = [(name if c == 1 else f"{c}*{name}") for name, c in terms]
    if constant or not parts:
        parts.append(str(constant))
    return " + ".join(parts)


def _halves(node: Node, args: list[str]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """The positive and the negative terms of a linear form, by their absolute coefficients."""
    coefficients = node.attr[0] if node.op == "linear" else (1,)
    terms = list(zip(args, coefficients, strict=True))
    return [(s, c) for s, c in terms if c > 0], [(s, -c) for s, c in terms if c < 0]


def _side(node: Node, args: list[str]) -> str:
    plus, minus = _halves(node, args)
    constant = node.attr[1]
    if not minus:
        return f"({_sum(plus, constant)})"
    right = _sum(minus, max(-constant, 0))
    right = f"({right})" if " + " in right else right
    return f"({_sum(plus, max(constant, 0))} - {right})" if plus or constant > 0 else f"(-{right})"


def _comparison(node: Node, args: list[str]) -> str:
    """`linear >= 0` or `linear == 0`, its negative terms moved to the other side.

    `args` are the texts of the linear form's terms.
    """
    form = node.args[0]
    plus, minus = _halves(form, args)
    constant = form.attr[1] if form.op == "linear" else 0
    sign = "==" if node.op == "eq0" else ">=" if constant >= 0 else ">"
    if sign == ">":
        constant += 1
    return f"({_sum(plus, max(constant, 0))} {sign} {_sum(minus, max(-constant, 0))})"
