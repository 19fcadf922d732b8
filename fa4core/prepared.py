"""`Prepared`: an attention call whose plan is made and whose kernel is loaded.

What is left to do at a call is to allocate the results and to launch. Every skeleton of kernels
(`Skeleton`) and every place that executes one (`fa4core.places`) share this; only the target and
the kernel differ. `fa4core.ops` prepares and runs calls, `fa4core.recall` keeps them.

A forward kernel's host function takes q, k, v, out (batch, rows, heads, d), lse and row_max (batch,
heads, rows), packed tensors without a batch, then what its skeleton's `run_time` says. A view with
a batch would cost each call a microsecond for each of them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import attrs
import torch

from fa4core.compile.cache import obtain
from fa4core.compile.kernel import Kernel, type_of
from fa4core.places import Place
from fa4core.plan.problem import Problem
from fa4core.plan.strides import copy_reason
from fa4core.reference.tiled import Call

Tensor = torch.Tensor
Shape = tuple[int, ...]
Results = tuple[Tensor, Any, Any]  # the last two None where they are not wanted

new = torch.empty_like


@attrs.frozen
class Skeleton:
    """One family of forward kernels.

    Attributes:
        spec_of: (call, target's name) -> what the kernel is compiled for.
        function: spec -> host function, "module:name".
        workspaces: (call, spec, shape of out, shape of row_max) -> shapes of float32 tensors that
            follow row_max, new ones for each call; -inf where the results are filled.
        metadata: (call, spec, place, device) -> what is planned for lengths, mask and schedule; a
            value to keep and to pass again.
        before: (call, place) -> kernels that making it launches.
        run_time: (call, spec, place, metadata) -> arguments after those: tensors, tuples of
            captured tensors, floats and ints; None if there is no work. On any device.
        lean: spec -> that of a quicker kernel, which gives no row maxima; None if there is none.
    """

    spec_of: Callable[[Call, str], Any]
    function: Callable[[Any], str]
    workspaces: Callable[[Call, Any, Shape, Shape], tuple[Shape, ...]]
    metadata: Callable[[Call, Any, Place, torch.device], Any]
    before: Callable[[Call, Place], tuple[Kernel, ...]]
    run_time: Callable[[Call, Any, Place, Any], tuple | None]
    lean: Callable[[Any], Any] | None = None


@attrs.frozen(eq=False)
class Prepared:
    """See the module. Call it with q, k, v of the shapes and strides it was prepared for.

    Attributes:
        launch: Takes all arguments; None if there is nothing to launch.
        shown: For each of q, k, v what makes of it the form that the kernel takes, or None to take
            it as it is; None if that holds for all.
        out, rows: Like the results, without memory: a new tensor is made of one more quickly than
            of a shape.
        spaces: Like the workspaces.
        fill: Whether there are rows that no kernel writes.
        rest: Arguments after the workspaces.
        unread: Where the kernel writes LSE and row maximum if nobody wants them.
        lean: Gives what to launch where no row maxima are wanted; None: `launch`.
    """

    launch: Callable[..., Any] | None
    shown: tuple[Callable[[Tensor], Tensor] | None, ...] | None
    out: Tensor
    rows: Tensor
    spaces: tuple[Tensor, ...]
    fill: bool
    rest: tuple
    unread: tuple[Any, Any]
    lean: Callable[[], Callable[..., Any]] | None = None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, with_lse: bool = True, with_max: bool = True
    ) -> Results:
        """Output, LSE and row maximum; None for what is not wanted, which costs no memory."""
        keep_for_graphs(self, q.device)
        out = new(self.out)
        lse = new(self.rows) if with_lse else None
        row_max = new(self.rows) if with_max else None
        spaces = [new(space) for space in self.spaces] if self.spaces else ()
        if self.fill:
            out.zero_()
            for rows in (lse, row_max, *spaces):
                if rows is not None:
                    rows.fill_(-torch.inf)
        if self.launch is None:
            return out, lse, row_max
        if self.shown is not None:
            of_q, of_k, of_v = self.shown
            q = q if of_q is None else of_q(q)
            k = k if of_k is None else of_k(k)
            v = v if of_v is None else of_v(v)
        to_lse, to_max = self.unread
        to_lse = to_lse if lse is None else lse
        to_max = to_max if row_max is None else row_max
        launch = self.launch if with_max or self.lean is None else self.lean()
        launch(q, k, v, out, to_lse, to_max, *spaces, *self.rest)
        return out, lse, row_max


def keep_for_graphs(prepared: Any, device: torch.device) -> None:
    """A graph that is captured now may be replayed for ever, and reads a prepared call's tables."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _in_graphs.append(prepared)


_in_graphs: list[Any] = []


def prepare(
    skeleton: Skeleton,
    call: Call,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    place: Place,
    metadata: Any = None,
) -> Prepared:
    """Plan a call, compile or find its kernel, and bring its tables to where it runs.

    Args:
        skeleton: The family of kernels.
        call: Validated and supported.
        q, k, v: As the call's layout says.
        place: Where it will run.
        metadata: The skeleton's, of an earlier call with these lengths, mask, schedule and place.
    """
    out_shape = (*q.shape[:-1], call.problem.head_dim_v)
    rows_shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    kernel, rest = kernel_of(skeleton, call, place, q.device, metadata)
    launch: Callable[..., Any] | None = None
    lean: Callable[[], Callable[..., Any]] | None = None
    spaces: tuple[Shape, ...] = ()
    if kernel is not None:
        assert place.launcher is not None
        batched = ((1, *s) if q.dim() == 3 else s for s in (out_shape, rows_shape))
        spaces = skeleton.workspaces(call, kernel.spec, *batched)
        rest = tuple(place.converted(moved(r, q.device)) for r in rest)
        launch = place.launcher(obtain(kernel).function)
        lean = _lean(skeleton, kernel, place)
    forms = shown(q, queries=True), shown(k, queries=False), shown(v, queries=False)
    fill = launch is None or not covered(call.problem.seqlens_q, q)
    prepared = Prepared(
        launch,
        None if forms == (None,) * 3 else forms,
        without_memory(out_shape, q.dtype, q.device),
        without_memory(rows_shape, torch.float32, q.device),
        tuple(without_memory(s, torch.float32, q.device) for s in spaces),
        fill,
        rest,
        tuple(place.converted(rows) for rows in _unread(rows_shape, q.device)),
        lean,
    )
    place.follow(prepared)
    return prepared


def _lean(
    skeleton: Skeleton, kernel: Kernel, place: Place
) -> Callable[[], Callable[..., Any]] | None:
    """Compiles at the first call that can do without row maxima."""
    if skeleton.lean is None:
        return None
    quicker = attrs.evolve(kernel, spec=skeleton.lean(kernel.spec))

    @functools.cache
    def launch() -> Callable[..., Any]:
        assert place.launcher is not None
        return place.launcher(obtain(quicker).function)

    return launch


def without_memory(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor to make others like it."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def _unread(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two tensors that all calls on a device may write at once, because nobody reads them."""
    count = math.prod(shape)
    second = -(-count // 4) * 4  # aligned to 16 bytes
    known = _scratch.get(device)
    if known is None or known.numel() < 2 * second:
        known = _scratch[device] = torch.empty(max(4 * second, 1 << 12), device=device)
    return known[:count].view(shape), known[second : second + count].view(shape)


_scratch: dict[torch.device, Tensor] = {}


def kernel_of(
    skeleton: Skeleton,
    call: Call,
    place: Place,
    device: torch.device = torch.device("cpu"),  # noqa: B008 (a value)
    metadata: Any = None,
) -> tuple[Kernel | None, tuple]:
    """A call's kernel, None if there is no work, and its arguments after the workspaces."""
    spec = skeleton.spec_of(call, place.target)
    if metadata is None:
        metadata = skeleton.metadata(call, spec, place, device)
    rest = skeleton.run_time(call, spec, place, metadata)
    if rest is None:
        return None, ()
    spaces = skeleton.workspaces(call, spec, (0,) * 4, (0,) * 3)
    types = _types(call.problem, spaces, rest)
    return Kernel(skeleton.function(spec), types, spec, place.target, place.emulated), rest


def _types(problem: Problem, spaces: tuple[Shape, ...], rest: tuple) -> tuple:
    """Types of all arguments. Inputs and output differ in their rank, if one side is packed."""
    of_q, of_k = (4 if starts is None else 3 for starts in (problem.starts_q, problem.starts_k))
    ranks = of_q, of_k, of_k, of_q
    like = [torch.empty((0,) * rank, dtype=problem.dtype) for rank in ranks]
    like += [torch.empty((0,) * (of_q - 1))] * 2
    like += [torch.empty((0,) * len(s)) for s in spaces]
    return tuple(map(type_of, (*like, *rest)))


def moved(argument: Any, device: torch.device) -> Any:
    if isinstance(argument, Tensor):
        return argument.to(device)
    if isinstance(argument, tuple):
        return tuple(moved(a, device) for a in argument)
    return argument


def covered(lengths: tuple[int, ...], tensor: Tensor) -> bool:
    """Whether every row of a tensor belongs to a sequence, so that a kernel writes its result."""
    rows = tensor.shape[0] if tensor.dim() == 3 else tensor.shape[0] * tensor.shape[1]
    return sum(lengths) == rows


def shown(tensor: Tensor, queries: bool) -> Callable[[Tensor], Tensor] | None:
    """How the kernel takes a tensor: with a stride that TMA takes in each dimension.

    A dimension of extent 1 may have any stride in torch, and nothing depends on it; one that is
    expanded (stride 0) has one entry.
    """
    if not tensor.numel():
        none = tensor.new_zeros(tuple(max(n, 1) for n in tensor.shape))  # nothing reads it
        return lambda _: none
    if copy_reason(tensor, queries) is not None:
        return _copied
    last = tensor.dim() - 1
    shape = tuple(1 if s == 0 else n for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    strides = tuple(
        (1 if i == last else 8) if n == 1 else stride
        for i, (n, stride) in enumerate(zip(shape, tensor.stride(), strict=True))
    )
    if shape == tensor.shape and strides == tensor.stride():
        return None
    return operator.methodcaller("as_strided", shape, strides)


def _copied(tensor: Tensor) -> Tensor:
    """For what TMA can't read where it is."""
    return tensor.clone(memory_format=torch.contiguous_format)
