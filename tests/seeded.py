"""Seeded protocol bugs: a role function with one of its protocol statements changed."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import attrs

METHODS = ("wait", "take", "arrive", "advance", "drain", "settle", "stored")


@attrs.frozen
class Bug:
    """One changed statement: its role, line of the function and text."""

    role: str
    line: int
    text: str
    change: str
    function: Callable[..., Any] = attrs.field(repr=False, eq=False)

    def __str__(self) -> str:
        return f"{self.role}:{self.line} {self.change} `{self.text}`"


def bugs(role: str, function: Callable[..., Any]) -> Iterator[Bug]:
    """The function without each of its waits, arrivals, advances and drains, and some doubled."""
    plain = getattr(function, "__wrapped__", function)
    source = textwrap.dedent(inspect.getsource(plain))
    for number, statement in enumerate(_statements(ast.parse(source))):
        line, text = statement.lineno, ast.unparse(statement)
        yield Bug(role, line, text, "drop", _built(source, number, plain, _nothing))
        if text.endswith("arrive(t)"):
            yield Bug(role, line, text, "double", _built(source, number, plain, _twice))


def _statements(tree: ast.AST) -> list[ast.Expr]:
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Expr) and _protocol(n)]
    return sorted(found, key=lambda n: n.lineno)


def _protocol(node: ast.Expr) -> bool:
    call = node.value
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in METHODS
    )


def _nothing(node: ast.Expr) -> list[ast.stmt]:
    return [ast.Pass()]


def _twice(node: ast.Expr) -> list[ast.stmt]:
    return [node, node]


def _built(
    source: str, number: int, like: Callable[..., Any], change: Callable[..., Any]
) -> Callable[..., Any]:
    tree = ast.parse(source)
    target = _statements(tree)[number]

    class Replace(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> Any:
            return change(node) if node is target else node

    changed = ast.fix_missing_locations(Replace().visit(tree))
    definition = next(n for n in changed.body if isinstance(n, ast.FunctionDef))
    definition.decorator_list = []
    space = dict(inspect.getmodule(like).__dict__)  # type: ignore[union-attr]
    exec(compile(changed, like.__name__, "exec"), space)
    return space[like.__name__]
