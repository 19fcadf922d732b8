"""Tracing: plain Python in, expression graph out.

The function runs once on `Traced` tensors (see `tensors`), whose operators build the graph. Score
functions run with autograd on: `torch.autograd.grad` of the same run yields the derivative with
respect to the score and to every captured tensor that requires grad, custom autograd functions
included.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import attrs
import torch

from primitives.expr import algebra as A
from primitives.expr import arrays
from primitives.expr.errors import DefinitionError, Refusal, explain_failure, location_of, name_of
from primitives.expr.node import Capture, Node
from primitives.expr.tensors import Session, Traced

#: Keyword-only parameters a function may ask for besides its indices.
LENGTHS = ("seqlen_q", "seqlen_k")


@attrs.frozen(eq=False)
class Derivative:
    """Derivatives of a function's value, times nothing: the chain rule is the caller's.

    `score` is d value / d score; `captured` lists (capture, indices, d value / d element). `wrt`
    are the captures that were differentiated for, because they required grad when traced.
    """

    score: Node
    captured: tuple[tuple[Capture, tuple[Node, ...], Node], ...] = ()
    wrt: frozenset[Capture] = frozenset()


def trace(function: Callable, variables: Sequence[str], noun: str) -> Node:
    """The value of `function(*variables)` as a node; `noun` is how errors call the function."""
    check_signature(function, variables, noun)
    with torch.no_grad():
        return _run(function, variables, noun, Session())[0]


def trace_with_derivative(
    function: Callable, variables: Sequence[str], noun: str
) -> tuple[Node, Callable[[], Derivative]]:
    """As `trace`, with the derivative; if there is none, asking for it raises the reason."""
    check_signature(function, variables, noun)
    session = Session()
    with torch.inference_mode(False), torch.enable_grad():
        value, out, score = _run(function, variables, noun, session)
        try:
            derivative = _derivative(out, score, session)
        except Exception as error:
            failure = explain_failure(function, error, "differentiate")
            failure.__cause__ = None if isinstance(error, Refusal) else error

            def refuse() -> Derivative:
                raise failure

            return value, refuse
    return value, lambda: derivative


def _run(
    function: Callable, variables: Sequence[str], noun: str, session: Session
) -> tuple[Node, torch.Tensor, Traced | None]:
    """The function's value, as a node and as a tensor, and the score it was a function of."""
    asked = [n for n in LENGTHS if n in _keyword_only(function)]
    inputs = {name: _variable(name) for name in (*variables, *asked)}
    score = inputs.get("score")
    try:
        with session.running():
            given = [inputs[n].clone() if n == "score" else inputs[n] for n in variables]
            out = function(*given, **{n: inputs[n] for n in asked})
        if isinstance(out, torch.Tensor) and not isinstance(out, Traced):
            out = session.stand_in(out)
        return _checked_result(out, noun), out, score
    except (Refusal, DefinitionError) as error:
        raise explain_failure(function, error) from None
    except Exception as error:
        raise explain_failure(function, error) from error


def _variable(name: str) -> Traced:
    is_score = name == "score"
    dtype = torch.float32 if is_score else torch.int64
    return Traced(arrays.scalar(A.var(name)), dtype, is_score and torch.is_grad_enabled())


def _derivative(out: torch.Tensor, score: Traced | None, session: Session) -> Derivative:
    captured = session.differentiable
    wrt = frozenset(Capture(tensor) for tensor, _ in captured)
    if not isinstance(out, torch.Tensor) or not out.requires_grad:
        return Derivative(A.const(0.0), wrt=wrt)
    # A tensor itself is an input too: a custom autograd function may have been given it directly.
    tensors = [x for pair in captured for x in pair]
    inputs = (*tensors, *(() if score is None else (score,)))
    one = Traced(arrays.scalar(A.const(1.0)), out.dtype)
    with session.running():
        # torch.autograd.grad would be a call for the function mode, and run the rest outside of it.
        engine = torch.autograd.Variable._execution_engine
        gradients = engine.run_backward((out,), (one,), False, False, inputs, True, False)
    rows = []
    for i, gradient in enumerate(gradients[: len(tensors)]):
        if isinstance(gradient, Traced):
            capture = Capture(captured[i // 2][0])
            entries = arrays.scatter(gradient.value).entries
            rows += [(capture, indices, d) for indices, d in entries if not _is_zero(d)]
    node = A.const(0.0)
    if score is not None and isinstance(gradients[-1], Traced):
        node = arrays.materialise(gradients[-1].value).scalar
    return Derivative(node, tuple(rows), wrt)


def _is_zero(node: Node) -> bool:
    return node.is_const and node.attr == 0


_RETURNS = {
    "mask": "a mask function returns one truth value for one query and one key, a 0-d bool tensor",
    "score": "a score function returns one score for one query and one key, a 0-d float tensor",
    "sink": "a sink function returns one logit for one query, a 0-d float tensor",
}


def _checked_result(out: object, noun: str) -> Node:
    """The node that a function returned, if it is what its kind of function returns."""
    hint = ""
    if isinstance(out, Traced) and not out.dim():
        node, given = arrays.materialise(out.value).scalar, str(out.dtype).removeprefix("torch.")
        if noun == "mask" and node.kind == "float":
            hint = " A function that changes scores is a score mod: use score.define."
        elif noun == "mask" and node.kind == "int":
            hint = " Compare it (`!= 0`), or use `.bool()`."
        elif noun != "mask" and node.kind == "bool":
            hint = " A function that returns a truth value is a mask: use mask.define."
        else:
            return node if noun == "mask" else A.to_float(node)
    elif isinstance(out, bool) if noun == "mask" else isinstance(out, int | float):
        return A.const(out if noun == "mask" else float(out))  # type: ignore[arg-type]
    elif isinstance(out, Traced):
        given = f"a tensor of shape {tuple(out.shape)}"
        hint = " Index captured tables down to one element."
    else:
        given = "None" if out is None else f"a {type(out).__name__}"
        hint = " Is its `return` missing?" if out is None else ""
    raise Refusal(f"it returns {given}; {_RETURNS[noun]}.{hint}")


def check_signature(function: Callable, variables: Sequence[str], noun: str) -> None:
    """Raise `DefinitionError` unless `function` takes one positional argument per variable."""
    if not callable(function):
        raise DefinitionError(f"a {noun} function is needed, got {type(function).__name__}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin or a compiled function: calling it will tell
    extra = [n for n in LENGTHS if n in _keyword_only(function)]
    try:
        signature.bind(*variables, **dict.fromkeys(extra))
    except TypeError as error:
        hint = ""
        required = [
            p
            for p in signature.parameters.values()
            if p.default is p.empty and p.kind < p.VAR_POSITIONAL
        ]
        if noun == "mask" and len(required) == 5:
            hint = " Five arguments are a score function's: use score.define."
        if noun == "score" and len(required) == 4:
            hint = " Four arguments are a mask function's: use mask.define."
        raise DefinitionError(
            f"{name_of(function)} ({location_of(function)}) has signature {signature}; a {noun} "
            f"function takes ({', '.join(_public_names(variables))}), and may ask for keyword-only "
            f"{' and '.join(LENGTHS)}.{hint}"
        ) from error


def _public_names(variables: Sequence[str]) -> list[str]:
    return [{"q": "q_idx", "k": "kv_idx"}.get(v, v) for v in variables]


def _keyword_only(function: Callable) -> set[str]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return set()
    return {n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
