"""Errors of tracing: they point at the user's own line and name the remedy."""

from __future__ import annotations

import ast
import linecache
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

_OWN = Path(__file__).resolve().parents[2]
_FOREIGN = tuple(
    str(Path(p).resolve())
    for p in (
        Path(torch.__file__).parent,
        sysconfig.get_paths()["stdlib"],
        _OWN / "primitives" / "expr",
        _OWN / "primitives" / "modifier.py",
    )
)


class DefinitionError(TypeError):
    """A mask or score function that cannot become a kernel, or is not what it was given as."""


def explain_failure(function: Callable, error: BaseException) -> DefinitionError:
    """The error a user should see when `function` could not be traced because of `error`."""
    frame = _user_frame(error)
    where = name_of(function)
    if frame is not None:
        source = linecache.getline(frame.filename, frame.lineno or 0).strip()
        where += f" ({frame.filename}, line {frame.lineno}):\n    {source}\n"
        remedy = _remedy(source, error)
    else:
        where += f" ({location_of(function)})"
        remedy = _remedy("", error)
    return DefinitionError(f"cannot trace {where.rstrip()}\n{remedy}")


def name_of(function: Callable) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def location_of(function: Callable) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code else repr(function)


def _user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame that is neither torch's, Python's own, nor this package's tracer."""
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        path = str(Path(frame.filename).resolve()) if frame.filename[0] != "<" else frame.filename
        if not path.startswith(_FOREIGN) and not path.startswith(sys.prefix + "/lib"):
            return frame
    return None


_BRANCH = (
    "the function is traced once, for all indices at a time, so a value that depends on them has "
    "no truth value yet."
)


def _remedy(source: str, error: BaseException) -> str:
    """What went wrong and what to write instead, from the line and the exception."""
    if isinstance(error, DefinitionError):
        return str(error)
    nodes = {type(n) for n in ast.walk(tree)} if (tree := _parse(source)) else set()
    text = str(error)
    if _is_value_needed(error):
        if ".item(" in source or ".tolist(" in source:
            return "`.item()` needs a number, but the index has none while tracing; use the tensor."
        if ast.Not in nodes:
            return f"`not` needs a truth value: {_BRANCH} Write `~(...)`."
        if ast.And in nodes or ast.Or in nodes:
            return (
                f"`and`/`or` need a truth value: {_BRANCH} Write `(...) & (...)`, `(...) | (...)`."
            )
        if nodes & {ast.If, ast.IfExp, ast.While, ast.Assert}:
            return (
                f"Python control flow needs a truth value: {_BRANCH} Write `torch.where(c, a, b)`."
            )
        if _has_chain(tree):
            return f"a chained comparison is an `and`: {_BRANCH} Write `(a <= x) & (x < b)`."
        if any(f"{f}(" in source for f in ("min", "max", "sorted")):
            return f"Python's min/max compare: {_BRANCH} Use `torch.minimum`, `torch.maximum`."
        return (
            f"this needs the value of an index: {_BRANCH} Use torch operations "
            "(`torch.where`, `&`, `|`, `~`, `torch.minimum`, ...)."
        )
    if "index" in text and isinstance(error, TypeError):
        return (
            f"{text}. To index a Python list by an index, make it a tensor: `torch.tensor(list)`."
        )
    return f"{type(error).__name__}: {textwrap.shorten(text, 400)}"


def _is_value_needed(error: BaseException) -> bool:
    name = type(error).__name__
    return name in ("GuardOnDataDependentSymNode", "DataDependentOutputException") or (
        "tracing tensor" in str(error) or "data-dependent" in str(error)
    )


def _parse(source: str) -> ast.AST | None:
    """The line's syntax tree; lines that open a block are completed first."""
    for candidate in (source, source + "\n    pass", "if True: pass\n" + source + "\n    pass"):
        try:
            return ast.parse(candidate)
        except SyntaxError:
            continue
    return None


def _has_chain(tree: ast.AST | None) -> bool:
    return tree is not None and any(
        isinstance(n, ast.Compare) and len(n.ops) > 1 for n in ast.walk(tree)
    )
