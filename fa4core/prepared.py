"""`Prepared`: an attention call whose plan is made and whose kernel is loaded.

What is left to do at a call is to allocate the results and to launch. Every skeleton of kernels
(`Skeleton`) and both places that execute one, a GPU and the emulator, share this; only the target
and the kernel differ. `fa4core.ops` prepares and runs calls, `fa4core.recall` keeps them.

A forward kernel's host function takes q, k, v, out (batch, rows, heads, d), packed tensors with
batch 1, lse and row_max (batch, heads, rows), then what its skeleton's `run_time` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from fa4core.compile.cache import obtain
from fa4core.compile.kernel import Kernel, type_of
from fa4core.plan.problem import Problem
from fa4core.reference.tiled import Call

Tensor = torch.Tensor
Results = tuple[Tensor, Tensor, Tensor]


@attrs.frozen
class Skeleton:
    """One family of forward kernels.

    Attributes:
        function: Host function, "module:name".
        spec_of: (call, target's name) -> what the kernel is compiled for.
        run_time: (call, spec, SMs) -> arguments after row_max: tensors, tuples of captured tensors,
            floats and ints; None if there is no work. Tensors may be on any device.
    """

    function: str
    spec_of: Callable[[Call, str], Any]
    run_time: Callable[[Call, Any, int], tuple | None]


@attrs.frozen(eq=False)
class Prepared:
    """See the module. Call it with q, k, v of the shapes and strides it was prepared for.

    Attributes:
        launch: Takes all arguments; None if there is nothing to launch.
        shown: For each of q, k, v its (shape, strides) as the kernel takes it, a tensor to take
            instead, or None to take it as it is.
        out_shape, rows_shape: Of the results, as the kernel takes them.
        packed: Whether results lose their batch dimension.
        fill: Whether there are rows that no kernel writes.
        rest: Arguments after row_max.
    """

    launch: Callable[..., Any] | None
    shown: tuple[Any, ...]
    out_shape: tuple[int, ...]
    rows_shape: tuple[int, ...]
    packed: bool
    fill: bool
    rest: tuple

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Results:
        dtype, device = q.dtype, q.device
        out = torch.empty(self.out_shape, dtype=dtype, device=device)
        lse = torch.empty(self.rows_shape, dtype=torch.float32, device=device)
        row_max = torch.empty(self.rows_shape, dtype=torch.float32, device=device)
        if self.fill:
            out.zero_()
            lse.fill_(-torch.inf)
            row_max.fill_(-torch.inf)
        if self.launch is not None:
            inputs = map(_as_shown, (q, k, v), self.shown)
            self.launch(*inputs, out, lse, row_max, *self.rest)
        return (out[0], lse[0], row_max[0]) if self.packed else (out, lse, row_max)


def prepare(
    skeleton: Skeleton, call: Call, q: Tensor, k: Tensor, v: Tensor, place: Place
) -> Prepared:
    """Plan a call, compile or find its kernel, and bring its tables to where it runs.

    Args:
        skeleton: The family of kernels.
        call: Validated and supported.
        q, k, v: As the call's layout says.
        place: Where it will run.
    """
    packed = q.dim() == 3
    batch = () if not packed else (1,)
    out_shape = (*batch, *q.shape[:-1], call.problem.head_dim_v)
    rows_shape = (out_shape[0], out_shape[2], out_shape[1])
    spec = skeleton.spec_of(call, place.target)
    rest = skeleton.run_time(call, spec, place.sms)
    launch = None
    if rest is not None:
        rest = tuple(_moved(r, q.device) for r in rest)
        types = _types(q.dtype, rest)
        kernel = Kernel(skeleton.function, types, spec, place.target, place.emulated)
        launch, rest = place.bind(obtain(kernel).function, rest)
    shown = tuple(_shown(t) for t in (q, k, v))
    fill = launch is None or not _covered(call.problem, q)
    return Prepared(launch, shown, out_shape, rows_shape, packed, fill, rest or ())


@attrs.frozen
class Place:
    """Where kernels run.

    Attributes:
        target: Name of the target.
        sms: Streaming multiprocessors.
        emulated: Whether it is the emulator.
        bind: (host function, arguments after row_max) -> what to call, and with which of these.
    """

    target: str
    sms: int
    emulated: bool
    bind: Callable[[Callable[..., Any], tuple], tuple[Callable[..., Any], tuple]]


def _types(dtype: torch.dtype, rest: tuple) -> tuple:
    """Types of all arguments. Inputs and output differ in nothing that is compiled for."""
    like = [torch.empty((0,) * 4, dtype=dtype)] * 4 + [torch.empty((0,) * 3)] * 2
    return tuple(map(type_of, (*like, *rest)))


def _moved(argument: Any, device: torch.device) -> Any:
    if isinstance(argument, Tensor):
        return argument.to(device)
    if isinstance(argument, tuple):
        return tuple(_moved(a, device) for a in argument)
    return argument


def _covered(problem: Problem, q: Tensor) -> bool:
    """Whether every row of the result belongs to a sequence, so that the kernel writes it."""
    rows = q.shape[0] if q.dim() == 3 else q.shape[0] * q.shape[1]
    return sum(problem.seqlens_q) == rows


def _shown(tensor: Tensor) -> Any:
    """How the kernel takes a tensor: four dimensions, and a stride that TMA takes in each.

    A dimension of extent 1 may have any stride in torch, and nothing depends on it.
    """
    form = tensor if tensor.dim() == 4 else tensor[None]
    if not form.numel():
        return tensor.new_zeros(tuple(max(n, 1) for n in form.shape))  # nothing reads it
    last = form.dim() - 1
    strides = tuple(
        (1 if i == last else 8) if n == 1 else stride
        for i, (n, stride) in enumerate(zip(form.shape, form.stride(), strict=True))
    )
    return None if strides == tensor.stride() else (tuple(form.shape), strides)


def _as_shown(tensor: Tensor, shown: Any) -> Tensor:
    if shown is None:
        return tensor
    return shown if isinstance(shown, Tensor) else tensor.as_strided(*shown)


def in_emulator(target: str) -> Place:
    """The emulator: the open session with its seed and number of SMs, or one for each call."""
    from fa4core.compile.targets import resolve
    from fa4core.emulator.session import current_session, emulator

    def bind(function: Callable[..., Any], rest: tuple) -> tuple[Callable[..., Any], tuple]:
        def launch(*arguments: Any) -> None:
            session = current_session()
            if session is not None:
                session.call(function, *arguments)
                return
            with emulator(target=target, record=False) as session:
                session.call(function, *arguments)

        return launch, rest

    session = current_session()
    sms = resolve(target).num_sms if session is None else session.num_sms
    return Place(target, sms, True, bind)


def on_device(target: str, device: torch.device) -> Place:
    """A GPU. The host function launches on the device of its tensors, on that device's current
    stream; tensors that stay the same from call to call are converted once."""
    import tvm_ffi

    def converted(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return tvm_ffi.from_dlpack(argument)
        if isinstance(argument, tuple):
            return tvm_ffi.convert(tuple(map(converted, argument)))
        return argument

    def bind(function: Callable[..., Any], rest: tuple) -> tuple[Callable[..., Any], tuple]:
        torch.cuda.synchronize(device)  # the tables are there, whichever stream launches
        return function, tuple(map(converted, rest))

    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Place(target, sms, False, bind)
