"""Where kernels run: a GPU, or the emulator."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import attrs
import torch


class Planned(Protocol):
    """A prepared call of either pass."""

    @property
    def rest(self) -> tuple:
        """What must live as long as a launch may read it."""
        ...


@attrs.frozen
class Place:
    """Where kernels run.

    Attributes:
        target: Name of the target.
        sms: Streaming multiprocessors.
        emulated: Whether it is the emulator.
        launcher: A kernel's host function -> what to call with its arguments; None if nothing will
            be launched there.
        converted: An argument that stays the same from call to call -> what to pass for it.
        follow: Told of every prepared call.
    """

    target: str
    sms: int
    emulated: bool
    launcher: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    converted: Callable[[Any], Any] = lambda argument: argument
    follow: Callable[[Planned], None] = lambda prepared: None


def in_emulator(target: str) -> Place:
    """The emulator: the open session with its seed and number of SMs, or one for each call."""
    from fa4core.compile.environment import exclusive
    from fa4core.compile.targets import resolve
    from fa4core.emulator.session import current_session, emulator

    def launcher(function: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*arguments: Any) -> None:
            with exclusive:
                session = current_session()
                if session is not None:
                    session.call(function, *arguments)
                    return
                with emulator(target=target, record=False) as session:
                    session.call(function, *arguments)

        return launch

    session = current_session()
    sms = resolve(target).num_sms if session is None else session.num_sms
    return Place(target, sms, True, launcher)


def on_device(target: str, device: torch.device) -> Place:
    """A GPU. Host functions launch on the device of their tensors, on its current stream.

    Tables of a prepared call are made on one stream and read on any. They are complete before the
    call is used, and tables of dropped calls are freed after the next synchronisation only.

    Raises:
        RuntimeError: A CUDA graph is being captured: the tables can't be made then.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "an attention call of new shapes or a new variant was made while a CUDA graph is "
            "captured; make the same call once before the capture"
        )

    def follow(prepared: Planned) -> None:
        torch.cuda.synchronize(device)
        _dropped[device].clear()
        end = weakref.finalize(prepared, _dropped[device].append, prepared.rest)
        end.atexit = False

    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Place(target, sms, False, lambda function: function, for_tvm_ffi, follow)


_dropped: defaultdict[torch.device, list[tuple]] = defaultdict(list)


def for_tvm_ffi(argument: Any) -> Any:
    """Tensors, also those in tuples, in the form that TVM-FFI would make of them at every call."""
    import tvm_ffi

    if isinstance(argument, torch.Tensor):
        return tvm_ffi.from_dlpack(argument)
    if isinstance(argument, tuple):
        return tvm_ffi.convert(tuple(map(for_tvm_ffi, argument)))
    return argument
