"""Errors of tracing: they point at the user's own line and name the remedy.

What was being asked of a traced value is known from the method that was called (`ValueNeeded`);
which construct asked is read off the syntax tree at the failing instruction's position.
"""

from __future__ import annotations

import ast
import linecache
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, TracebackType

import attrs
import numpy
import torch

_STDLIB = str(Path(sysconfig.get_paths()["stdlib"]).resolve())
_FOREIGN = tuple(
    str(Path(file).resolve().parent) for file in (torch.__file__, numpy.__file__, __file__)
)


class DefinitionError(TypeError):
    """A mask or score function that cannot become a kernel, or is not what it was given as."""


class Refusal(Exception):
    """What a traced operator can't do, said inside a trace; `explain_failure` adds the place.

    No `TypeError`, because torch's operators take one for "the other operand may know better".
    `place` is where the user's code asked for it, if that is not where the error was raised.
    """

    place: Place | None = None


class ValueNeeded(Refusal):
    """A traced value was asked for a number; `question` says how: bool, index, int, ..."""

    def __init__(self, question: str) -> None:
        super().__init__(f"the value of an index is asked for ({question})")
        self.question = question


def explain_failure(
    function: Callable, error: BaseException, verb: str = "trace"
) -> DefinitionError:
    """The error a user should see when `function` could not be traced because of `error`."""
    place = getattr(error, "place", None) or _user_place(error)
    if place is None:
        where, construct = f"{name_of(function)} ({location_of(function)})", ""
    else:
        where = f"{name_of(function)} ({place.filename}, line {place.line}):\n    {place.source}"
        construct = place.construct()
    return DefinitionError(f"cannot {verb} {where}\n{_remedy(error, construct)}")


def name_of(function: Callable) -> str:
    named = getattr(function, "func", function)  # functools.partial
    return getattr(named, "__name__", None) or type(named).__name__


def location_of(function: Callable) -> str:
    """File and line of a function, of a partial's function, or of an object's `__call__`."""
    named = getattr(function, "func", function)
    code = getattr(named, "__code__", None)
    if code is None and hasattr(type(named), "__call__"):  # noqa: B004
        code = getattr(type(named).__call__, "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code else repr(function)


# ------------------------------------------------------------------------------- the user's line


@attrs.frozen
class Place:
    """An instruction of the user's code: its file, line and exact position in the source."""

    filename: str
    line: int
    position: tuple[int, int, int, int] | None  # first line, last line, first column, last column

    @property
    def source(self) -> str:
        last = self.position[1] if self.position else self.line
        lines = [linecache.getline(self.filename, n) for n in range(self.line, last + 1)][:4]
        return textwrap.indent(textwrap.dedent("".join(lines)).strip(), "    ").strip()

    def construct(self) -> str:
        """What asked there: not, and, or, if, chain, min, range, subscript, slice, ...; or ''."""
        if self.position is None:
            return ""
        try:
            tree = ast.parse("".join(linecache.getlines(self.filename)))
        except SyntaxError:
            return ""
        around = [n for n in ast.walk(tree) if isinstance(n, _SPANNED) and _holds(n, self.position)]
        around.sort(key=lambda n: (n.end_lineno - n.lineno, n.end_col_offset - n.col_offset))  # type: ignore[operator]
        for node in around:
            if isinstance(node, ast.Lambda | ast.FunctionDef):
                return ""
            if name := _name_of_construct(node, self.position):
                return name
        return ""


_SPANNED = (ast.expr, ast.stmt)


def _holds(node: ast.AST, position: tuple[int, int, int, int]) -> bool:
    first, last, start, end = position
    return (node.lineno, node.col_offset) <= (first, start) and (last, end) <= (  # type: ignore[attr-defined]
        node.end_lineno,  # type: ignore[attr-defined]
        node.end_col_offset,  # type: ignore[attr-defined]
    )


def _name_of_construct(node: ast.AST, position: tuple[int, int, int, int]) -> str:
    if isinstance(node, ast.BoolOp):
        return "and" if isinstance(node.op, ast.And) else "or"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "not"
    if isinstance(node, ast.Compare):
        if any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
            return "in"
        return "chain" if len(node.ops) > 1 else ""
    if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
        names = {ast.While: "while", ast.Assert: "assert"}
        return names.get(type(node), "if") if _holds(node.test, position) else ""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return "store"
    if isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") == "shape":
        return "shape"
    if isinstance(node, ast.Subscript):
        return "slice" if any(isinstance(n, ast.Slice) for n in ast.walk(node.slice)) else "list"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return "math" if getattr(node.func.value, "id", "") == "math" else node.func.attr
    return ""


def _user_place(error: BaseException) -> Place | None:
    """The innermost frame that is neither torch's, Python's own, nor this package's tracer."""
    for step in reversed(list(_steps(error.__traceback__))):
        if not _foreign(step.tb_frame.f_code.co_filename):
            return _place(step.tb_frame.f_code, step.tb_lasti, step.tb_lineno)
    return None


def calling_place() -> Place | None:
    """Where the user's code is now: the innermost frame of the running call that is the user's."""
    frame = sys._getframe(1)
    while frame is not None and _foreign(frame.f_code.co_filename):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else _place(frame.f_code, frame.f_lasti, frame.f_lineno)


def _place(code: CodeType, instruction: int, line: int) -> Place:
    spans = list(code.co_positions())[instruction // 2 : instruction // 2 + 1]
    known = spans and all(x is not None for x in spans[0])
    return Place(code.co_filename, line, spans[0] if known else None)  # type: ignore[arg-type]


def _steps(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


@lru_cache(maxsize=4096)
def _foreign(filename: str) -> bool:
    if filename.startswith("<frozen"):
        return True
    path = str(Path(filename).resolve())
    if path.startswith(_STDLIB) and "site-packages" not in path:
        return True
    return path.startswith(_FOREIGN)


# ------------------------------------------------------------------------------------ the remedy

_ONCE = (
    "the function is traced once, for all indices at a time, so a value that depends on them is "
    "not known yet."
)
_TRUTH = {
    "not": "`not` needs a truth value: {once} Write `~(...)`.",
    "and": "`and` needs a truth value: {once} Write `(...) & (...)`.",
    "or": "`or` needs a truth value: {once} Write `(...) | (...)`.",
    "chain": "a chained comparison is an `and`: {once} Write `(a <= x) & (x < b)`.",
    "if": "Python's `if` needs a truth value: {once} Write `torch.where(condition, a, b)`.",
    "while": "Python's `while` needs a truth value: {once} Loop over a fixed count.",
    "assert": "`assert` needs a truth value: {once} Check what you captured before the function.",
    "in": "`in` needs truth values: {once} Write `(x == a) | (x == b)`, or capture a bool table.",
    "min": "Python's `min` compares: {once} Use `torch.minimum`, or `x.clamp(max=...)`.",
    "max": "Python's `max` compares: {once} Use `torch.maximum`, or `x.clamp(min=...)`.",
    "any": "Python's `any` needs truth values: {once} Join them with `|`.",
    "all": "Python's `all` needs truth values: {once} Join them with `&`.",
    "bool": "`bool(...)` needs a truth value: {once} Use `.bool()`, or a comparison.",
}
_NUMBER = {
    "range": "`range` needs a number: {once} Loop over a fixed count, with `torch.where` inside.",
    "slice": "a slice needs numbers: {once} Index with `table[start + i]` instead.",
    "list": (
        "a Python list, tuple or array needs a number as its index: {once} Make it a tensor before "
        "the function: `table = torch.tensor(values)`."
    ),
    "shape": "a shape needs a number as its index: {once} Write the dimension's number.",
    "int": "`int(...)` needs a number: {once} Use `.long()`.",
    "float": "`float(...)` needs a number: {once} Use `.float()`.",
    "round": "`round(...)` needs a number: {once} Use `torch.round`.",
    "math": "functions of `math` need numbers: {once} Use torch's function of the same name.",
}
_ITEM = {
    name: f"`.{name}()` reads a value: {{once}} Use the tensor itself; of a captured tensor, read "
    "the value before the function."
    for name in ("item", "tolist")
} | {"store": "writes into a tensor at an index: {once} Choose values with `torch.where`."}
_QUESTIONS = {
    "bool": (
        "a truth value is needed here: {once} Use torch operations (`torch.where`, `&`, `|`, `~`, "
        "`torch.minimum`, ...)."
    ),
    "item": (
        "a number is needed here: {once} Use the tensor itself; of a captured tensor, read the "
        "value before the function."
    ),
    "numpy": (
        "numpy needs numbers: {once} Use torch's functions; make arrays tensors before the "
        "function."
    ),
    "in": _TRUTH["in"],
    "int": _NUMBER["int"],
    "float": "a Python float is needed here: {once} Use torch's functions, and `.float()`.",
    "index": "a number is needed here: {once} Use torch operations on the tensor.",
}


#: What torch raises when an operator itself needs the value of a fake tensor.
_DATA_DEPENDENT = {
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
}

_BOOLEAN_INDEX = (
    "a boolean index takes as many elements as are true, and a shape that depends on values isn't "
    "supported. Choose values with `torch.where(condition, a, b)`."
)
_NO_SHAPE = (
    "there is no such dimension. Indices are 0-d tensors, one query and one key at a time, without "
    "a shape. For the lengths, ask for keyword-only seqlen_q and seqlen_k: "
    "`def f(b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k)`."
)
_FLOAT_INDEX = (
    "a table is indexed by floats; integers are accepted. Divide with `//`, which gives an integer "
    "(`/` gives a float), or cut off with `.long()`."
)
#: What torch says of indices that are no integers.
_WRONG_INDEX = ("tensors used as indices must be", "for index, but got")
#: What torch says where a function asks for the size of a 0-d tensor.
_ASKS_SHAPE = ("tensor has no dimensions", "of a 0-d tensor")


def _needs_values(construct: str) -> str:
    operator = f"`{construct}`" if construct else "an operator"
    example = "torch.bucketize(torch.arange(n), t)" if construct == "bucketize" else "..."
    return (
        f"{operator} needs the value of an index and isn't supported here: {_ONCE} Make its "
        f"results a table before the function, `ids = {example}`, and index that: `ids[q_idx]`."
    )


def _remedy(error: BaseException, construct: str) -> str:
    """What went wrong and what to write instead."""
    if isinstance(error, ValueNeeded):
        tables = {"bool": _TRUTH, "item": _ITEM, "numpy": {}, "in": {}}
        texts = tables.get(error.question, _NUMBER)
        return texts.get(construct, _QUESTIONS[error.question]).format(once=_ONCE)
    if isinstance(error, Refusal | DefinitionError):
        return str(error)
    if type(error).__name__ in _DATA_DEPENDENT:
        return _QUESTIONS["index"].format(once=_ONCE)
    if type(error).__name__ == "PendingUnbackedSymbolNotFound":
        return _BOOLEAN_INDEX
    text = str(error)
    if text.startswith("Cannot cast FakeTensor"):
        return _needs_values(construct)
    if any(said in text for said in _ASKS_SHAPE):
        return _NO_SHAPE
    if any(said in text for said in _WRONG_INDEX):
        return _FLOAT_INDEX
    if construct == "shape" and isinstance(error, IndexError):
        return _NO_SHAPE
    if isinstance(error, KeyError) and isinstance(error.args[0], torch.Tensor):
        return f"a dict needs known keys: {_ONCE} Capture a tensor and index that."
    return f"{type(error).__name__}: {textwrap.shorten(text, 500)}"
