"""One trace for all builds of a prebuilt mask or score mod that differ only in run-time values.

A prebuilt function's graph depends on its code and on the structure of what it closes over: dtypes
and shapes of tensors, and plain Python values. Building it again with other tensors of the same
form binds the first trace's graph to them, which takes a fraction of a trace's time.

This is for functions of this package only: it takes for granted that their globals don't change,
and that they look at no tensor's values. Functions of users are traced every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

import attrs
import torch

from primitives.expr.node import Capture, Node, captures
from primitives.expr.text import dump, parse
from primitives.expr.trace import Derivative, GradientRule, trace, trace_with_derivative


class _Unknown(Exception):
    """The function closes over something of which it isn't known what a trace depends on."""


@attrs.frozen
class _Template:
    """A traced graph over slots: which of the function's tensors each slot was."""

    text: str
    slots: tuple[int, ...]
    rows: tuple[tuple[int, int], ...] = ()  # of a derivative: tensor and rank of each row
    wrt: tuple[int, ...] = ()


_TEMPLATES: dict[Any, _Template] = {}


def trace_prebuilt(function: Callable, variables: Sequence[str], noun: str) -> Node:
    """As `trace`, for a function of this package."""
    key, tensors = _form(function)
    template = _TEMPLATES.get(key)
    if template is None:
        expr = trace(function, variables, noun)
        if key is not None and (slots := _slots((expr,), tensors)) is not None:
            _TEMPLATES[key] = _Template(dump([expr]), slots)
        return expr
    return parse(template.text, [tensors[i] for i in template.slots])[0]


def trace_prebuilt_with_derivative(
    function: Callable, variables: Sequence[str], noun: str
) -> tuple[Node, Callable[[], Derivative]]:
    """As `trace_with_derivative`, for a function of this package."""
    key, tensors = _form(function)
    template = _TEMPLATES.get(key)
    if template is None:
        expr, rule = trace_with_derivative(function, variables, noun)
        if key is not None and (made := _derivative_template(expr, rule(), tensors)) is not None:
            _TEMPLATES[key] = made
        return expr, rule
    expr, by_score, *rest = parse(template.text, [tensors[i] for i in template.slots])
    nodes = iter(rest)
    rows = tuple(
        (Capture(tensors[i]), tuple(next(nodes) for _ in range(rank)), next(nodes))
        for i, rank in template.rows
    )
    derivative = Derivative(by_score, rows, frozenset(Capture(tensors[i]) for i in template.wrt))
    return expr, GradientRule(derivative)


def _derivative_template(
    expr: Node, derivative: Derivative, tensors: list[torch.Tensor]
) -> _Template | None:
    roots = [expr, derivative.score]
    for _, indices, node in derivative.captured:
        roots += [*indices, node]
    places = {id(t): i for i, t in enumerate(tensors)}
    slots = _slots(roots, tensors)
    named = [c for c, _, _ in derivative.captured] + list(derivative.wrt)
    if slots is None or any(id(c.tensor) not in places for c in named):
        return None
    rows = tuple((places[id(c.tensor)], len(indices)) for c, indices, _ in derivative.captured)
    return _Template(dump(roots), slots, rows, tuple(places[id(c.tensor)] for c in derivative.wrt))


def _slots(roots: Sequence[Node], tensors: list[torch.Tensor]) -> tuple[int, ...] | None:
    """Which tensor each capture is; None if one is none of them (it was made inside)."""
    places = {id(t): i for i, t in enumerate(tensors)}
    found = [places.get(id(c.tensor)) for c in captures(*roots)]
    return None if None in found else tuple(found)  # type: ignore[arg-type]


def _form(function: Callable) -> tuple[Any, list[torch.Tensor]]:
    """What a trace of the function depends on, and its tensors; None if that isn't known."""
    tensors: dict[int, torch.Tensor] = {}
    try:
        form = _describe(function, tensors, depth=0)
    except _Unknown:
        return None, []
    return (form, torch.get_default_dtype()), list(tensors.values())


def _describe(value: Any, tensors: dict[int, torch.Tensor], depth: int) -> Any:
    if depth > 8:
        raise _Unknown
    inner = depth + 1
    if isinstance(value, torch.Tensor):
        tensors.setdefault(id(value), value)
        place = list(tensors).index(id(value))
        return ("tensor", place, value.dtype, tuple(value.shape), value.device, value.requires_grad)
    if value is None or isinstance(value, bool | int | str | CodeType):
        return type(value), value
    if isinstance(value, float):
        return "float", value.hex()
    if isinstance(value, tuple | list):
        return ("sequence", *(_describe(v, tensors, inner) for v in value))
    if isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        parts = (value.__code__, value.__defaults__, *map(_content, cells))
        return ("function", *(_describe(p, tensors, inner) for p in parts))
    if attrs.has(type(value)):
        fields = attrs.fields(type(value))
        return (type(value), *(_describe(getattr(value, f.name), tensors, inner) for f in fields))
    raise _Unknown


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        raise _Unknown from None
