"""Docstrings of public functions name every argument."""

from __future__ import annotations

import inspect
import re
from types import ModuleType

import pytest

import fa4core
import fa4core.testing
from primitives import exp, mask, schedule, score, sequence, sink, sparsity

MODULES = (fa4core, fa4core.testing, exp, mask, schedule, score, sequence, sink, sparsity)


def functions(module: ModuleType) -> list[tuple[str, object]]:
    public = getattr(module, "__all__", ())
    return [
        (f"{module.__name__}.{n}", f)
        for n, f in vars(module).items()
        if inspect.isfunction(f) and (n in public or f.__module__ == module.__name__)
        if not n.startswith("_")
    ]


FUNCTIONS = dict(pair for module in MODULES for pair in functions(module))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_is_named(name: str) -> None:
    function = FUNCTIONS[name]
    text = inspect.getdoc(function) or ""
    assert text, f"{name} has no docstring"
    if "Args:" not in text:
        return
    section = re.split(r"\n(?=\S)", text.split("Args:\n", 1)[1])[0]
    lines = re.findall(r"^    (\w[\w, ]*):", section, re.MULTILINE)
    named = {name.strip() for line in lines for name in line.split(",")}
    assert set(inspect.signature(function).parameters) <= named


def test_it_would_find_one_that_is_missing() -> None:
    assert "fa4core.attention" in FUNCTIONS and len(FUNCTIONS) > 40
