"""Shows CPU tensors to CuTe DSL as CUDA ones, and answers for the driver, inside one block of code.

The DSL reads the device of a tensor from its DLPack form and refuses (TVM-FFI) or mis-types
(plain form: generic instead of global pointers) what is not on a GPU. So, while the block runs,
torch tensors export themselves as ``cuda:0`` at their CPU address, which is what kernels see.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fa4core.compile.environment import exclusive
from fa4core.compile.targets import Target

_CUDA = 2  # DLPack's kDLCUDA
_DEVICE_OFFSET = {
    b"dltensor": 8,
    b"dltensor_versioned": 40,
}  # of device_type in the capsule's struct

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_is = ctypes.pythonapi.PyCapsule_IsValid
_capsule_is.restype = ctypes.c_int
_capsule_is.argtypes = [ctypes.py_object, ctypes.c_char_p]


def as_cuda(capsule: object) -> object:
    """Rewrite the device of a DLPack capsule to cuda:0, in place."""
    for name, offset in _DEVICE_OFFSET.items():
        if _capsule_is(capsule, name):
            device = ctypes.c_int32 * 2
            device.from_address(_capsule_pointer(capsule, name) + offset)[:] = [_CUDA, 0]
            return capsule
    raise BufferError("not a DLPack capsule")


class Patches:
    """Attributes replaced for one block of code."""

    _MISSING = object()

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, holder: Any, name: str, value: Any) -> None:
        self._undo.append((holder, name, vars(holder).get(name, self._MISSING)))
        setattr(holder, name, value)

    def remove(self, holder: Any, name: str) -> None:
        if name in vars(holder):
            self._undo.append((holder, name, vars(holder)[name]))
            delattr(holder, name)

    def undo(self) -> None:
        for holder, name, value in reversed(self._undo):
            if value is self._MISSING:
                delattr(holder, name)
            else:
                setattr(holder, name, value)
        self._undo.clear()


@contextlib.contextmanager
def disguise(
    target: Target,
    num_sms: int,
    exported: Callable[[torch.Tensor], None],
    finish: Callable[[], None],
) -> Iterator[None]:
    """exported: told of each tensor whose address may reach a kernel. finish: called after each
    call of compiled host code; raises what went wrong inside a launch."""
    import tvm_ffi  # noqa: F401  (importing it later would put its C table back)

    patches = Patches()
    try:
        _patch_tensors(patches, exported)
        _patch_calls(patches, finish)
        _patch_hardware_info(patches, target, num_sms)
        yield
    finally:
        patches.undo()


def _patch_tensors(patches: Patches, exported: Callable[[torch.Tensor], None]) -> None:
    dlpack, data_ptr = torch.Tensor.__dlpack__, torch.Tensor.data_ptr

    def export(self: torch.Tensor, **options: Any) -> object:
        exported(self)
        version = options.get("max_version")
        capsule = dlpack(self.detach(), **({"max_version": version} if version else {}))
        return as_cuda(capsule)

    def address(self: torch.Tensor) -> int:
        exported(self)
        return data_ptr(self)

    patches.set(torch.Tensor, "__dlpack__", export)
    patches.set(torch.Tensor, "__dlpack_device__", lambda self: (_CUDA, 0))
    patches.set(torch.Tensor, "data_ptr", address)
    patches.set(torch.Tensor, "is_cuda", property(lambda self: True))
    patches.remove(
        torch.Tensor, "__dlpack_c_exchange_api__"
    )  # a C table that knows the true device


def visible(argument: Any) -> Any:
    """An argument of a TVM-FFI function with its tensors in the form that kernels see."""
    import tvm_ffi

    if isinstance(argument, torch.Tensor):
        return tvm_ffi.from_dlpack(argument)
    if isinstance(argument, tuple) and hasattr(argument, "_fields"):
        return type(argument)(*map(visible, argument))
    if isinstance(argument, tuple | list):
        return type(argument)(map(visible, argument))
    return argument


def _patch_calls(patches: Patches, finish: Callable[[], None]) -> None:
    from cutlass.base_dsl.jit_executor import JitExecutor
    from cutlass.cutlass_dsl import cuda_jit_executor, tvm_ffi_provider

    def finishing(original: Callable[..., Any], convert: bool) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if convert:
                args = tuple(map(visible, args))
                kwargs = {name: visible(value) for name, value in kwargs.items()}
            with exclusive:
                try:
                    return original(self, *args, **kwargs)
                finally:
                    finish()  # replaces the host code's error, which says only that one failed

        return call

    def patch(holder: Any, name: str, convert: bool) -> None:
        patches.set(holder, name, finishing(getattr(holder, name), convert))

    patch(JitExecutor, "run_compiled_program", convert=False)
    patch(tvm_ffi_provider.TVMFFIJitCompiledFunction, "__call__", convert=True)
    patch(tvm_ffi_provider.TVMFFIJitCompiledFunctionWithKwargs, "__call__", convert=True)

    function_type = cuda_jit_executor.CudaDialectJitCompiledFunction
    load = function_type._load_cuda_library

    def load_library(self: Any) -> list[Any]:
        load(self)
        return []  # so that nobody unloads our handle through the true CUDA runtime

    patches.set(function_type, "num_devices", property(lambda self: 1))
    patches.set(function_type, "_load_cuda_library", load_library)


@contextlib.contextmanager
def known_hardware(target: Target, num_sms: int) -> Iterator[None]:
    """Answer for the driver where the DSL's users ask it what the hardware has, and nothing else:
    enough to compile."""
    patches = Patches()
    try:
        _patch_hardware_info(patches, target, num_sms)
        yield
    finally:
        patches.undo()


def _patch_hardware_info(patches: Patches, target: Target, num_sms: int) -> None:
    from cutlass.utils import HardwareInfo

    def construct(self: Any, device_id: int = 0) -> None:
        self.device_id = device_id

    def clusters(self: Any, cluster_size: int, stream: Any = None) -> int:
        return max(num_sms // cluster_size, 1)

    patches.set(HardwareInfo, "__init__", construct)
    patches.set(HardwareInfo, "get_max_active_clusters", clusters)
    patches.set(HardwareInfo, "get_l2_cache_size_in_bytes", lambda self: target.l2_bytes)
    patches.set(HardwareInfo, "get_device_multiprocessor_count", lambda self: num_sms)
