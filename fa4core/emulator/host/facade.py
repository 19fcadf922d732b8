"""Lets code that says ``device="cuda"`` run on CPU tensors, inside one block of code.

Tensors say that they are on ``cuda:0``, functions that are told to put one there put it on the CPU,
and ``torch.cuda`` answers for the emulated target. Work is synchronous: streams, events and
synchronisation do nothing, and elapsed times mean nothing. Used for scripts (`fa4core emulate`) and
for other people's wrappers around kernels; our own code does not need it.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fa4core.compile.targets import Target
from fa4core.emulator.host.calls import device_attributes
from fa4core.emulator.host.disguise import Patches

_DEVICE = torch.device("cuda", 0)
_CPU = torch.device("cpu")


def _to_cpu(value: Any) -> Any:
    """A device argument that means CUDA becomes the CPU; everything else stays."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    return value


class _RedirectCuda(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.pin_memory:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
            if isinstance(kwargs["device"], int):  # device=0 is the first GPU
                kwargs["device"] = _CPU
        if func is torch.Tensor.to:
            args = (args[0], *map(_to_cpu, args[1:]))
        return func(*args, **kwargs)


class _RedirectDispatch(TorchDispatchMode):
    """The same below torch's custom operators, which run with function modes switched off."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _to_cpu(kwargs["device"])
        return func(*args, **kwargs)


class _Stream:
    """A stream, or a stream's event: everything has happened already."""

    cuda_stream = 0
    device = _DEVICE

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 0)

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def elapsed_time(self, other: _Stream) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    synchronize = wait_stream = wait_event = record = wait = _nothing

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or _Stream()


def _properties(target: Target, num_sms: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=f"{target.device_name} (emulated)",
        major=target.compute_capability[0],
        minor=target.compute_capability[1],
        multi_processor_count=num_sms,
        total_memory=2**34,
        L2_cache_size=target.l2_bytes,
        warp_size=32,
        max_threads_per_multi_processor=target.threads_per_sm,
        regs_per_multiprocessor=target.registers_per_sm,
        shared_memory_per_block=49_152,
        shared_memory_per_block_optin=target.smem_per_cta,
        shared_memory_per_multiprocessor=target.smem_per_sm,
    )


def _patch_bindings(patches: Patches, target: Target, num_sms: int) -> None:
    """The few calls that scripts make to cuda-python's driver and runtime themselves."""
    from cuda.bindings import driver, runtime  # noqa: PLC0415

    ok, fine = driver.CUresult.CUDA_SUCCESS, runtime.cudaError_t.cudaSuccess
    attributes = {int(number): value for number, value in device_attributes(target, num_sms)}
    answers = {
        "cuInit": (ok,),
        "cuDeviceGetCount": (ok, 1),
        "cuDeviceGet": (ok, driver.CUdevice(0)),
        "cuCtxGetDevice": (ok, driver.CUdevice(0)),
        "cuCtxGetCurrent": (ok, driver.CUcontext(1)),
        "cuCtxCreate": (ok, driver.CUcontext(1)),
        "cuCtxSynchronize": (ok,),
        "cuStreamSynchronize": (ok,),
        "cuDriverGetVersion": (ok, 13_000),
    }
    for name, answer in answers.items():
        patches.set(driver, name, lambda *args, _answer=answer: _answer)
    patches.set(
        driver, "cuDeviceGetAttribute", lambda number, device: (ok, attributes[int(number)])
    )
    for name in ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaSetDevice"):
        patches.set(runtime, name, lambda *args: (fine,))
    for name, answer in {"cudaGetDeviceCount": 1, "cudaGetDevice": 0}.items():
        patches.set(runtime, name, lambda *args, _answer=answer: (fine, _answer))


@contextlib.contextmanager
def cuda_facade(target: Target, num_sms: int) -> Iterator[None]:
    """See the module. Open it inside an `emulator` block."""
    patches = Patches()
    properties = _properties(target, num_sms)
    cuda = torch.cuda
    try:
        patches.set(torch.Tensor, "device", property(lambda self: _DEVICE))
        patches.set(torch.Tensor, "get_device", lambda self: 0)
        for name, answer in {
            "is_available": True,
            "is_initialized": True,
            "device_count": 1,
            "current_device": 0,
            "get_device_capability": target.compute_capability,
            "get_device_name": properties.name,
            "get_device_properties": properties,
            "is_bf16_supported": True,
            "is_current_stream_capturing": False,
            "memory_allocated": 0,
            "max_memory_allocated": 0,
            "mem_get_info": (2**34, 2**34),
        }.items():
            patches.set(cuda, name, lambda *args, _answer=answer, **kwargs: _answer)
        for name in (
            "init", "synchronize", "set_device", "empty_cache", "manual_seed", "manual_seed_all",
            "reset_peak_memory_stats", "set_stream",
        ):  # fmt: skip
            patches.set(cuda, name, lambda *args, **kwargs: None)
        for name in ("current_stream", "default_stream", "stream", "device", "Stream", "Event"):
            patches.set(cuda, name, _Stream)
        _patch_bindings(patches, target, num_sms)
        with _RedirectCuda(), _RedirectDispatch():
            yield
    finally:
        patches.undo()
