"""Tensors that stand for arrays of nodes while a function runs: the machinery of tracing.

A traced function is ordinary Python over torch tensors. It is run once with `Traced` tensors in
place of its indices, and two modes see every operator that it calls:

* `_Functions` (torch's function mode) stands captured tensors in by traced ones, so that autograd
  runs between traced tensors only, and turns `tensor[index]` into a gather.
* `_Operators` (torch's dispatch mode) gets what is left when composite operators have been taken
  apart and autograd has noted what it needs, and applies the rule of `aten` for each.

Gradients come from torch's own autograd: its formulas are operators like any other here. Result
shapes and dtypes are torch's too, asked of its meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from primitives.expr import algebra as A
from primitives.expr import arrays
from primitives.expr.arrays import Value
from primitives.expr.aten import REDUCTIONS, RULES, Result, reduced_dims
from primitives.expr.errors import DefinitionError, Refusal, ValueNeeded
from primitives.expr.node import Capture, kind_of

_NARROW = (torch.int8, torch.int16, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_MAY_WRAP = {"add", "sub", "rsub", "mul", "neg", "abs", "pow", "bitwise_left_shift", "__lshift__"}
_MAY_WRAP |= {"bitwise_not", "prod", "square"}
_FLOAT8 = tuple(
    getattr(torch, name) for name in dir(torch) if name.startswith(("float8_", "float4_"))
)


class Traced(torch.Tensor):
    """A tensor without storage whose elements are nodes: `value` is the array (or scatter).

    Whatever asks for a number raises `ValueNeeded`, which names the question.
    """

    value: Value
    #: Whether it stands for a tensor from outside the function.
    captured: bool
    #: Whether another tensor is a view of it, or it of another.
    aliased: bool

    @staticmethod
    def __new__(cls, value: Value, dtype: torch.dtype, requires_grad: bool = False) -> Traced:
        self = torch.Tensor._make_wrapper_subclass(
            cls, value.shape, dtype=dtype, requires_grad=requires_grad
        )
        self.value, self.captured, self.aliased = value, False, False
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        raise DefinitionError("a tensor of a traced function was used after the function returned")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Traced({tuple(self.shape)}, {self.dtype})"

    def __bool__(self) -> bool:
        raise ValueNeeded("bool")

    def __index__(self) -> int:
        raise ValueNeeded("index")

    def __int__(self) -> int:
        raise ValueNeeded("int")

    def __float__(self) -> float:
        raise ValueNeeded("float")

    def __complex__(self) -> complex:
        raise ValueNeeded("float")

    def __contains__(self, _: object) -> bool:
        raise ValueNeeded("in")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise ValueNeeded("numpy")

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise ValueNeeded("numpy")

    def item(self) -> Any:
        raise ValueNeeded("item")

    def tolist(self) -> Any:
        raise ValueNeeded("item")


def _map(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """`function` applied to every tensor in an operator's arguments."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        mapped = [_map(function, v) for v in value]
        return mapped if isinstance(value, list) else tuple(mapped)
    if isinstance(value, dict):
        return {k: _map(function, v) for k, v in value.items()}
    return value


class Session:
    """One run of a function: the traced stand-ins of the tensors that it captures."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[torch.Tensor, Traced]] = {}

    def stand_in(self, tensor: torch.Tensor) -> Traced:
        """The traced tensor for a captured one; differentiable if that requires grad."""
        known = self._of.get(id(tensor))
        if known is None:
            known = self._of[id(tensor)] = tensor, _captured(tensor)
        return known[1]

    @property
    def differentiable(self) -> list[tuple[torch.Tensor, Traced]]:
        """Captured tensors that require grad, with their stand-ins."""
        return [(t, s) for t, s in self._of.values() if s.requires_grad]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, operators are traced."""
        with _disable_current_modes(), _cpu(), _Operators(self), _Functions(self):
            yield


def _captured(tensor: torch.Tensor) -> Traced:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise Refusal(
            "a tensor of an enclosing torch.func transform (vmap, grad, ...) is captured; define "
            "the mask or score mod outside of it"
        )
    if tensor.layout is not torch.strided:
        raise Refusal(
            f"a captured tensor has layout {tensor.layout}; capture a dense one (`.to_dense()`)"
        )
    value = arrays.captured(Capture(tensor), tensor.shape)
    grad = tensor.requires_grad and tensor.dtype.is_floating_point
    result = Traced(value, tensor.dtype, grad)
    result.captured = True
    return result


@contextmanager
def _cpu() -> Iterator[None]:
    """Take `with torch.device(...)` around the definition out of play."""
    if torch.get_default_device().type == "cpu":
        yield
    else:
        with torch.device("cpu"):
            yield


class _Functions(TorchFunctionMode):
    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _AS_IT_IS:
            return func(*args, **kwargs)
        args, kwargs = _map(self._traced, args), _map(self._traced, kwargs)
        if func is torch.Tensor.__getitem__:
            tensor, index = args
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(i, torch.Tensor) for i in index):
                return _gather(tensor, index)
        return func(*args, **kwargs)

    def _traced(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, Traced) else self.session.stand_in(tensor)


#: What reads a captured tensor's own shape, dtype and so on.
_AS_IT_IS = {
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "ndim", "requires_grad", "layout", "is_leaf")
} | {
    torch.Tensor.dim,
    torch.Tensor.size,
    torch.Tensor.numel,
    torch.Tensor.__len__,
}


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


class _Operators(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the guard against torch.compile would import it, which takes seconds

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        try:
            with torch._C.DisableTorchFunction():
                return self._operate(func, args, kwargs or {})
        except TypeError as error:
            raise Refusal(f"{type(error).__name__}: {error}") from error

    def _operate(self, func: Any, args: tuple, kwargs: dict) -> Any:
        name = str(func.overloadpacket)
        if name in _ASKS_VALUE:
            raise ValueNeeded("item")
        if name == "aten.lift_fresh":
            return _constant(args[0])
        if func._schema.is_mutable:
            return _write(func, args, self._functional(func, args, kwargs))
        rule = RULES.get(name)
        if rule is None:
            return self._decomposed(func, name, args, kwargs)
        values, named = _map(self._value, args), _map(self._value, kwargs)
        out = _result_of(func, name, args, kwargs)
        _refuse_rounding(name, args, out)
        return self._wrap(func, args, rule(_first(out), *values, **named), out)

    def _functional(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """What an in-place operator writes, by the operator that returns it instead."""
        namespace, _, name = str(func.overloadpacket).partition(".")
        packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
        out_of_place = getattr(packet, func._overloadname, None)
        if out_of_place is None or out_of_place is func:
            raise Refusal(_unsupported(func, name))
        with self._again():
            return out_of_place(*args, **kwargs)

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Both modes, inside an operator, for what it is made of."""
        with self, torch._C._EnableTorchFunction(), _Functions(self.session):
            yield

    def _value(self, tensor: torch.Tensor) -> Value:
        if not isinstance(tensor, Traced):  # past the function mode: inside a custom function
            tensor = self.session.stand_in(tensor)
        return tensor.value

    def _wrap(self, func: Any, args: tuple, produced: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            return [Traced(p, o.dtype) for p, o in zip(produced, out, strict=True)]
        result = Traced(produced, out.dtype)
        alias = func._schema.returns[0].alias_info
        if alias is not None and isinstance(args[0], Traced):
            result.aliased = args[0].aliased = True
            result.captured = args[0].captured
        return result

    def _decomposed(self, func: Any, name: str, args: tuple, kwargs: dict) -> Any:
        decomposition = _decompositions().get(func)
        if decomposition is None or _varies(func, name):
            raise Refusal(_unsupported(func, name))
        try:
            with self._again():
                return decomposition(*args, **kwargs)
        except Refusal as refusal:
            if "operator prims." not in str(refusal):
                raise
            raise Refusal(_unsupported(func, name)) from refusal


_ASKS_VALUE = {"aten._local_scalar_dense", "aten.item", "aten.equal", "aten.is_nonzero"}


def _constant(tensor: torch.Tensor) -> Traced:
    """A tensor made inside the function: a number is a constant, a table is captured."""
    if tensor.dim() == 0:
        node = A.const(tensor.item())
        return Traced(arrays.scalar(node), tensor.dtype)
    return _captured(tensor)


def _write(func: Any, args: tuple, produced: Any) -> Traced:
    """An in-place operator: the tensor stands for the new value from here on."""
    target = args[0]
    if not isinstance(target, Traced) or target.captured:
        raise Refusal(
            "writes into a captured tensor; a mask or score function computes one value and "
            "changes nothing"
        )
    if target.aliased:
        raise Refusal(
            "writes in place into a tensor that others are views of; write `x = x + y` instead"
        )
    if produced.shape != target.shape:
        raise Refusal(
            f"{func} writes shape {tuple(produced.shape)} into shape {tuple(target.shape)}"
        )
    target.value = arrays.cast(produced.value, kind_of(target.dtype))
    return target


@cache
def _example(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones((1,) * rank, dtype=dtype)


@cache
def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _result_of(func: Any, name: str, args: tuple, kwargs: dict) -> Result | tuple[Result, ...]:
    """Shape and dtype of the result, by torch's own rules.

    The meta device would answer every question, but its answers take Python a millisecond each for
    pointwise operators (and seconds to load). Those have a dtype that small examples show, and a
    shape by broadcasting.
    """
    if name in _LIKE_FIRST:
        return Result(tuple(args[0].shape), kwargs.get("dtype") or args[0].dtype)
    if name in _SIZES_SECOND:
        return Result(tuple(args[1]), kwargs.get("dtype") or args[0].dtype)
    if name in ("aten.index", "aten._unsafe_index"):
        shapes = [None if i is None else tuple(i.shape) for i in args[1]]
        return Result(arrays.indexed_shape(tuple(args[0].shape), shapes), args[0].dtype)
    if torch.Tag.pointwise in func.tags or name in _POINTWISE:
        operands: list[tuple[int, ...]] = []

        def example(tensor: torch.Tensor) -> torch.Tensor:
            operands.append(tuple(tensor.shape))
            return _example(tensor.dim(), tensor.dtype)

        result = func(*_map(example, args), **_map(example, kwargs))
        return Result(_broadcast(operands), result.dtype)
    if name in REDUCTIONS:
        return _reduced(func, args, kwargs)
    return _result_on_meta(func, args, kwargs)


_LIKE_FIRST = {"aten.index_put", "aten._unsafe_index_put", "aten.clone", "aten.detach"}
_LIKE_FIRST |= {"aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.masked_fill"}
_LIKE_FIRST |= {"aten.copy", "aten.fill", "aten._index_put_impl"}
_POINTWISE = {"aten.floor_divide", "aten.rsub"}  # and what torch has tagged so
_SIZES_SECOND = {"aten.select_backward", "aten.slice_backward", "aten.new_zeros"}


def _reduced(func: Any, args: tuple, kwargs: dict) -> Result:
    shape = tuple(args[0].shape)
    keep = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    result = func(_example(len(shape), args[0].dtype), *args[1:], **kwargs)
    dims = reduced_dims(args[1] if len(args) > 1 else kwargs.get("dim"), len(shape))
    kept = [1 if d in dims else n for d, n in enumerate(shape) if keep or d not in dims]
    return Result(tuple(kept), result.dtype)


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    shape = arrays.broadcast(shapes)
    for given in shapes:
        for size, common in zip(reversed(given), reversed(shape), strict=False):
            if size not in (1, common):
                raise ValueError(f"shapes {', '.join(map(str, shapes))} can't be broadcast")
    return shape


def _result_on_meta(func: Any, args: tuple, kwargs: dict) -> Result | tuple[Result, ...]:
    def on_meta(tensor: torch.Tensor) -> torch.Tensor:
        return _meta(tuple(tensor.shape), tensor.dtype)

    args, kwargs = _map(on_meta, args), _map(on_meta, kwargs)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("meta")}
        kwargs.pop("pin_memory", None)
    result = func(*args, **kwargs)
    if isinstance(result, list | tuple):
        return tuple(Result(tuple(r.shape), r.dtype) for r in result)
    return Result(tuple(result.shape), result.dtype)


def _first(out: Result | tuple[Result, ...]) -> Result:
    return out[0] if isinstance(out, tuple) else out


def _refuse_rounding(name: str, args: tuple, out: Any) -> None:
    """Integers are exact and floats are float32 in a graph: refuse what relies on less."""
    dtype = _first(out).dtype
    short = name.rpartition(".")[2]
    if dtype in _NARROW and (short in _MAY_WRAP or (short == "_to_copy" and _wider(args[0]))):
        raise Refusal(
            f"{short} to {dtype} could wrap around; stay with .int() or .long()"
            if short == "_to_copy"
            else f"{short} on {dtype} could wrap around; convert with .int() or .long() first"
        )
    if dtype in _FLOAT8 and short == "_to_copy":
        raise Refusal(
            f"a cast to {dtype} rounds, and scores are computed in float32; round before the call, "
            "and capture the result"
        )


def _wider(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dtype not in (torch.bool, *_NARROW[:1])


@cache
def _decompositions() -> dict[Any, Callable]:
    from torch._decomp import decomposition_table  # imports much: only when it's needed

    return decomposition_table


_VARYING = {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive"}
_VARYING |= {"repeat_interleave", "bincount", "argwhere"}


def _varies(func: Any, name: str) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags or name.rpartition(".")[2] in _VARYING


def _unsupported(func: Any, name: str) -> str:
    if torch.Tag.nondeterministic_seeded in func.tags:
        return (
            f"{func} draws random numbers, which would differ in every pass; use mask.random, or "
            "draw them before and capture the tensor"
        )
    if name.rpartition(".")[2] in _VARYING:
        return (
            f"the shape of the result of {func} depends on values; compute it before, and capture "
            "the tensor, or use torch.where"
        )
    return (
        f"operator {func} is not one a mask or score function can use; write it with index and "
        "float arithmetic, comparisons, torch.where, or captured tables"
    )
