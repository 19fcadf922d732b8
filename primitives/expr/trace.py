"""Tracing: plain Python in, expression graph out.

torch's own `make_fx` runs the function once on 0-d fake tensors and records its operators;
`recorded` turns them into nodes. Score functions run with autograd on, and `torch.autograd.grad` in
the same run yields the derivative with respect to the score and to every captured tensor that
requires grad, custom autograd functions included.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import _engine_run_backward, saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import annotate, preserve_node_meta
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from primitives.expr import algebra as A
from primitives.expr import arrays
from primitives.expr.errors import (
    DefinitionError,
    Refusal,
    ValueNeeded,
    calling_place,
    explain_failure,
    location_of,
    name_of,
)
from primitives.expr.node import Capture, Node
from primitives.expr.recorded import has_rule, is_mutable, translate, varies

#: Keyword-only parameters a function may ask for besides its indices.
LENGTHS = ("seqlen_q", "seqlen_k")

#: What the graph has no rule for is taken apart by torch's own decompositions.
_DECOMPOSITIONS: dict[Any, Callable] = {
    operator: rule
    for operator, rule in decomposition_table.items()
    if not (has_rule(operator) or varies(operator) or is_mutable(operator))
}


@attrs.frozen(eq=False)
class Derivative:
    """Derivatives of a function's value, times nothing: the chain rule is the caller's.

    `score` is d value / d score; `captured` lists (capture, indices, d value / d element). `wrt`
    are the captures that were differentiated for, because they required grad when traced.
    """

    score: Node
    captured: tuple[tuple[Capture, tuple[Node, ...], Node], ...] = ()
    wrt: frozenset[Capture] = frozenset()


@attrs.frozen(eq=False)
class GradientRule:
    """A function's derivative, or why it has none, which is raised when it is asked for."""

    derivative: Derivative = Derivative(A.const(0.0))
    failure: DefinitionError | None = None

    def __call__(self) -> Derivative:
        if self.failure is not None:
            raise self.failure
        return self.derivative


def trace(function: Callable, variables: Sequence[str], noun: str) -> Node:
    """The value of `function(*variables)` as a node; `noun` is how errors call the function."""
    check_signature(function, variables, noun)
    run = _Run(function, variables, noun, differentiate=False)
    with torch.no_grad():
        return run.value()


def trace_with_derivative(
    function: Callable, variables: Sequence[str], noun: str
) -> tuple[Node, GradientRule]:
    """As `trace`, with the derivative; if there is none, asking for it raises the reason."""
    check_signature(function, variables, noun)
    run = _Run(function, variables, noun, differentiate=True)
    with torch.inference_mode(False), torch.enable_grad():
        value = run.value()
    try:
        if run.failure is not None:
            raise run.failure
        derivative = run.derivative()
    except Exception as error:
        failure = explain_failure(function, error, "differentiate")
        failure.__cause__ = None if isinstance(error, Refusal) else error
        return value, GradientRule(failure=failure)
    return value, GradientRule(derivative)


class _Run:
    """One run of a function under `make_fx`, and what it left behind."""

    def __init__(
        self, function: Callable, variables: Sequence[str], noun: str, *, differentiate: bool
    ) -> None:
        self.function, self.noun, self.differentiate = function, noun, differentiate
        self.variables = tuple(variables)
        self.asked = tuple(n for n in LENGTHS if n in _keyword_only(function))
        self.watch = _Watch()
        self.returned: Any = None
        self.failure: Exception | None = None  # of differentiation, which may never be needed
        self.outputs: list[Any] = []

    def value(self) -> Node:
        """Run, translate, and check the result."""
        try:
            with _undisturbed(), _on_cpu(), preserve_node_meta():
                module = make_fx(
                    self._traced,
                    tracing_mode="fake",
                    decomposition_table=_DECOMPOSITIONS,
                    _allow_non_fake_inputs=True,
                )(*self._examples())
            self.outputs = translate(module, (*self.variables, *self.asked), self.watch.captured)
            return _checked_result(self.returned, self.outputs[0], self.noun)
        except (Refusal, DefinitionError) as error:
            raise explain_failure(self.function, error) from None
        except Exception as error:
            raise explain_failure(self.function, error) from error

    def derivative(self) -> Derivative:
        wrt = frozenset(Capture(t) for t in self.watch.differentiable)
        gradients = self.outputs[1:]
        if not gradients:
            return Derivative(A.const(0.0), wrt=wrt)
        by_score = gradients.pop(0) if "score" in self.variables else None
        rows = []
        for tensor, gradient in zip(self.watch.differentiable, gradients, strict=True):
            if gradient is not None:
                entries = arrays.scatter(gradient).entries
                rows += [(Capture(tensor), i, d) for i, d in entries if not _is_zero(d)]
        node = A.const(0.0) if by_score is None else arrays.materialise(by_score).scalar
        return Derivative(node, tuple(rows), wrt)

    def _examples(self) -> list[torch.Tensor]:
        return [
            torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=self.differentiate)
            if name == "score"
            else torch.zeros((), dtype=torch.int64, device="cpu")
            for name in (*self.variables, *self.asked)
        ]

    def _traced(self, *inputs: torch.Tensor) -> list[Any]:
        """What `make_fx` records: the value, and its gradients if they are wanted."""
        count = len(self.variables)
        by_name = dict(zip(self.variables, inputs[:count], strict=True))
        # A clone, so that an in-place update of the score is one of a value, not of the input.
        given = [x.clone() if n == "score" else x for n, x in by_name.items()]
        with self.watch:
            out = self.function(*given, **dict(zip(self.asked, inputs[count:], strict=True)))
        self.returned = out
        if not isinstance(out, torch.Tensor):
            return [None]
        self.watch.note(out)  # a captured tensor returned as it is was in no call
        if not self.differentiate or not out.requires_grad:
            return [out]
        wanted = [by_name["score"]] if "score" in by_name else []
        inputs = (*wanted, *self.watch.differentiable)
        try:
            # What torch.autograd.grad calls; itself it would suspend the watch, under which the
            # backward of a custom autograd function must run, too.
            with self.watch:
                gradients = _engine_run_backward(
                    (out,),
                    (torch.ones_like(out),),
                    False,
                    False,
                    inputs,
                    True,
                    accumulate_grad=False,
                )
        except Exception as error:
            self.failure = error
            return [out]
        return [out, *gradients]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Take what may surround the definition out of play: modes, autocast, and hooks on what
    autograd saves, such as those of activation checkpointing and offloading."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            stack.enter_context(saved_tensors_hooks(_as_it_is, _as_it_is))
        yield


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextmanager
def _on_cpu() -> Iterator[None]:
    """Take a `with torch.device(...)` around the definition out of play.

    Only where there is one: the mode that does it looks at every call, a quarter of a trace's time.
    """
    if torch.get_default_device().type == "cpu":
        yield
    else:
        with torch.device("cpu"):
            yield


class _Watch(TorchFunctionMode):
    """Sees every call of the function: which tensors it captures, and what it asks of values.

    `tensor[i]` with 0-d indices becomes a gather; torch would ask the index for its value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.captured: dict[int, torch.Tensor] = {}

    @property
    def differentiable(self) -> list[torch.Tensor]:
        """Captured tensors that require grad, in order of first use."""
        return [t for t in self.captured.values() if t.requires_grad and t.dtype.is_floating_point]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        question = _QUESTIONS.get(getattr(func, "__name__", ""))
        if question is not None:
            raise ValueNeeded(question)
        tree_map_only(torch.Tensor, self.note, (args, kwargs))
        with annotate({"place": calling_place()}):  # so that a refused operator has a line
            if func is torch.Tensor.__getitem__:
                tensor, index = args
                index = index if isinstance(index, tuple) else (index,)
                if any(isinstance(i, slice) and _asks_tensor(i) for i in index):
                    raise ValueNeeded("index")
                if any(isinstance(i, torch.Tensor) for i in index):
                    return _gather(tensor, index)
            return func(*args, **kwargs)

    def note(self, tensor: torch.Tensor) -> None:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise Refusal(
                "a tensor of an enclosing torch.func transform (vmap, grad, ...) is captured; "
                "define the mask or score mod outside of it"
            )
        if tensor.layout is not torch.strided:
            raise Refusal(
                f"a captured tensor has layout {tensor.layout}; capture a dense one (`.to_dense()`)"
            )
        if not isinstance(tensor, FakeTensor):
            self.captured.setdefault(id(tensor), tensor)


#: Methods that need a number, and how `ValueNeeded` calls the question.
_QUESTIONS = {
    "__bool__": "bool",
    "__index__": "index",
    "__int__": "int",
    "__float__": "float",
    "__complex__": "float",
    "__contains__": "in",
    "__array__": "numpy",
    "numpy": "numpy",
    "item": "item",
    "tolist": "item",
    "__setitem__": "item",
}


def _asks_tensor(part: slice) -> bool:
    return any(isinstance(x, torch.Tensor) for x in (part.start, part.stop, part.step))


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


def _is_zero(node: Node) -> bool:
    return node.is_const and node.attr == 0


_RETURNS = {
    "mask": "a mask function returns one truth value for one query and one key, a 0-d bool tensor",
    "score": "a score function returns one score for one query and one key, a 0-d float tensor",
    "sink": "a sink function returns one logit for one query, a 0-d float tensor",
}


def _checked_result(out: object, value: arrays.Value | None, noun: str) -> Node:
    """The node that a function returned, if it is what its kind of function returns."""
    hint = ""
    if isinstance(out, torch.Tensor) and value is not None and not value.shape:
        node, given = arrays.materialise(value).scalar, str(out.dtype).removeprefix("torch.")
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
    elif isinstance(out, torch.Tensor):
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
