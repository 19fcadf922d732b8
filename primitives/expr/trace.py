"""Tracing: plain Python in, expression graph out.

torch's own `make_fx` runs the function once on 0-d fake tensors; each ATen operator it records is
turned into nodes by the rules of `aten`. Score functions are traced a second time together with
`torch.autograd.grad`, which yields the derivative with respect to the score and to every captured
tensor that requires grad, custom autograd functions included.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from primitives.expr import algebra as A
from primitives.expr import arrays
from primitives.expr.aten import RULES, Result
from primitives.expr.errors import DefinitionError, explain_failure, location_of, name_of
from primitives.expr.node import Capture, Node, captures

#: Keyword-only parameters a function may ask for besides its indices.
LENGTHS = ("seqlen_q", "seqlen_k")

#: `select_backward` and `slice_backward` stay whole: decomposed, they become a `where` over a
#: gradient, which is no list of entries any more (a learned table indexed by a constant needs it).
_DECOMPOSITIONS: dict[Any, Callable] = {
    op: rule
    for op, rule in core_aten_decompositions().items()
    if str(getattr(op, "overloadpacket", op)) not in ("aten.select_backward", "aten.slice_backward")
}


@attrs.frozen(eq=False)
class Derivative:
    """Derivatives of a score function's value, times nothing: the chain rule is the caller's.

    `score` is d value / d score; `captured` lists (capture, indices, d value / d element). `wrt`
    are the captures that were differentiated for, because they required grad when traced.
    """

    score: Node
    captured: tuple[tuple[Capture, tuple[Node, ...], Node], ...] = ()
    wrt: frozenset[Capture] = frozenset()


class _IndexByTensor(TorchFunctionMode):
    """`tensor[i]` with 0-d indices as a gather; torch would ask the index for its value."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, torch.Tensor) for i in index):
                return _gather(tensor, index)
        return func(*args, **(kwargs or {}))


def _gather(tensor: torch.Tensor, index: tuple) -> torch.Tensor:
    """Numpy's basic indexing for everything but tensors, then one gather for the tensors."""
    given = sum(i is not None and i is not Ellipsis for i in index)
    if given > tensor.dim():
        raise IndexError(f"{given} indices for a tensor of {tensor.dim()} dimensions")
    basic: list[Any] = []
    chosen: list[torch.Tensor | None] = []
    for i in index:
        if isinstance(i, torch.Tensor):
            basic.append(slice(None))
            chosen.append(i)
            continue
        basic.append(i)
        if i is Ellipsis:
            chosen += [None] * (tensor.dim() - given)
        elif not isinstance(i, int):
            chosen.append(None)
    if any(not (isinstance(i, slice) and i == slice(None)) for i in basic):
        tensor = tensor[tuple(basic)]
    return torch.ops.aten.index(tensor, chosen)


def trace(function: Callable, variables: Sequence[str], noun: str) -> Node:
    """The value of `function(*variables)` as a node; `noun` is how errors call the function."""
    check_signature(function, variables, noun)
    (value,), _ = _run(function, variables, None)
    if not isinstance(value, arrays.Array) or value.shape != ():
        raise DefinitionError(
            f"{name_of(function)} ({location_of(function)}) returned an array of shape "
            f"{value.shape}; a {noun} function returns one value for one query and one key"
        )
    return value.scalar


def derivative(function: Callable, variables: Sequence[str], value: Node) -> Derivative:
    """The derivative of a score function that was traced to `value`."""
    differentiable = [
        c
        for c in captures(value)
        if c.kind == "float" and c.tensor is not None and c.tensor.requires_grad
    ]
    if "score" not in value.free and not differentiable:
        return Derivative(A.const(0.0))
    tensors = [c.tensor for c in differentiable if c.tensor is not None]
    (_, *gradients), _ = _run(function, variables, tensors)
    by_score, *by_capture = gradients
    rows = []
    for capture, gradient in zip(differentiable, by_capture, strict=True):
        if gradient is not None:
            entries = arrays.scatter(gradient).entries
            rows += [(capture, indices, node) for indices, node in entries if not _is_zero(node)]
    score = A.const(0.0) if by_score is None else arrays.materialise(by_score).scalar
    return Derivative(score, tuple(rows), frozenset(differentiable))


def _is_zero(node: Node) -> bool:
    return node.is_const and node.attr == 0


def check_signature(function: Callable, variables: Sequence[str], noun: str) -> None:
    """Raise `DefinitionError` unless `function` takes one positional argument per variable."""
    if not callable(function):
        raise DefinitionError(f"a {noun} function is needed, got {type(function).__name__}")
    names = _public_names(variables)
    try:
        signature = inspect.signature(function)
        extra = [n for n in LENGTHS if n in _keyword_only(signature)]
        signature.bind(*variables, **dict.fromkeys(extra))
    except TypeError as error:
        hint = ""
        count = len(inspect.signature(function).parameters)
        if noun == "mask" and count == 5:
            hint = " Five arguments are a score function's: use score.define."
        if noun == "score" and count == 4:
            hint = " Four arguments are a mask function's: use mask.define."
        raise DefinitionError(
            f"{name_of(function)} ({location_of(function)}) has signature {signature}; a {noun} "
            f"function takes ({', '.join(names)}), and may ask for keyword-only "
            f"{' and '.join(LENGTHS)}.{hint}"
        ) from error


def _public_names(variables: Sequence[str]) -> list[str]:
    return [{"q": "q_idx", "k": "kv_idx"}.get(v, v) for v in variables]


def _keyword_only(signature: inspect.Signature) -> set[str]:
    return {n for n, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY}


def _run(
    function: Callable, variables: Sequence[str], wanted: Sequence[torch.Tensor] | None
) -> tuple[list[Any], torch.fx.GraphModule]:
    """Trace the function (and its gradients, if `wanted` is given) and translate the graph."""
    asked = [n for n in LENGTHS if n in _keyword_only(inspect.signature(function))]
    names = [*variables, *asked]

    def traced(*inputs: torch.Tensor) -> Any:
        keywords = dict(zip(asked, inputs[len(variables) :], strict=True))
        with _IndexByTensor():
            out = function(*inputs[: len(variables)], **keywords)
        if not isinstance(out, torch.Tensor):
            out = torch.as_tensor(out)
        if wanted is None:
            return [out]
        if not out.requires_grad:
            return [out, None, *(None for _ in wanted)]
        scores = [x for x, name in zip(inputs, names, strict=True) if name == "score"]
        gradients = torch.autograd.grad(out, [*scores, *wanted], allow_unused=True)
        return [out, *(gradients if scores else (None, *gradients))]

    example = [
        torch.zeros((), dtype=torch.float32, requires_grad=wanted is not None)
        if name == "score"
        else torch.zeros((), dtype=torch.int64)
        for name in names
    ]
    try:
        with torch.enable_grad() if wanted is not None else torch.no_grad():
            module = make_fx(
                traced,
                tracing_mode="fake",
                decomposition_table=_DECOMPOSITIONS,
                _allow_non_fake_inputs=True,
            )(*example)
        return _translate(module, names), module
    except DefinitionError as error:
        raise explain_failure(function, error) from None
    except Exception as error:
        raise explain_failure(function, error) from error


def _translate(module: torch.fx.GraphModule, names: Sequence[str]) -> list[Any]:
    """Run the recorded graph over `Array`s."""
    inputs = iter(names)
    values: dict[torch.fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = arrays.scalar(A.var(next(inputs)))
        elif node.op == "get_attr":
            tensor = getattr(module, node.target)
            values[node] = arrays.captured(Capture(tensor), tensor.shape)
        elif node.op == "output":
            return [values[a] if isinstance(a, torch.fx.Node) else a for a in node.args[0]]
        else:
            values[node] = _apply(node, values)
    raise AssertionError("a graph without an output")


def _apply(node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
    name = str(getattr(node.target, "overloadpacket", node.target))
    result = node.meta["val"]
    if name not in RULES or not isinstance(result, torch.Tensor):
        raise DefinitionError(
            f"operator {node.target} is not one a mask or score function can use; write it with "
            "index and float arithmetic, comparisons, torch.where, or captured tables"
        )
    out = Result(tuple(result.shape), result.dtype)
    if result.dtype in (torch.int8, torch.uint8, torch.int16) and _computes(name):
        raise DefinitionError(
            f"{name} on {result.dtype} could wrap around; convert with .int() or .long() first"
        )
    args = torch.fx.map_arg(node.args, lambda n: values[n])
    kwargs = torch.fx.map_arg(dict(node.kwargs), lambda n: values[n])
    return RULES[name](out, *args, **kwargs)


def _computes(name: str) -> bool:
    return name.removeprefix("aten.") in {"add", "sub", "mul", "neg", "abs", "bitwise_left_shift"}
