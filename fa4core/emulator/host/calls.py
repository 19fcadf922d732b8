"""Turns the run-time library's launch callback into `Launch` values.

Struct layouts are cudart's `cudaLaunchConfig_t` and `cudaLaunchAttribute` (72 bytes, id at 0,
value at 8; id 4 is the cluster's dimensions), as the DSL's IR shows them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from fa4core.compile.targets import Target
from fa4core.emulator.host import library, modules
from fa4core.emulator.launch import Launch

LAUNCH_FAILURE = 719  # cudaErrorLaunchFailure
_CLUSTER_DIMENSION = 4
_ATTRIBUTE_BYTES = 72


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_smem", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint32),
    )


_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int32,
    ctypes.POINTER(_LaunchConfig),
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_void_p),
)


def _cluster(config: _LaunchConfig) -> tuple[int, int, int]:
    for index in range(config.num_attributes):
        at = config.attributes + index * _ATTRIBUTE_BYTES
        if ctypes.c_uint32.from_address(at).value == _CLUSTER_DIMENSION:
            x, y, z = (ctypes.c_uint32 * 3).from_address(at + 8)
            return (max(x, 1), max(y, 1), max(z, 1))  # zero: the kernel sets none
    return (1, 1, 1)


def read_launch(config: _LaunchConfig, ptx: str, name: str, params: tuple[bytes, ...]) -> Launch:
    """The value of one call of ``_cudaLaunchKernelEx``."""
    return Launch(
        ptx=ptx,
        kernel=name,
        grid=tuple(config.grid),
        block=tuple(config.block),
        cluster=_cluster(config),
        dynamic_smem=config.dynamic_smem,
        params=params,
        name=_short(name),
    )


def _short(kernel: str) -> str:
    """The Python name of the kernel function inside the DSL's mangled one."""
    return kernel.removeprefix("kernel_cutlass_").split("_tensorptr")[0].split("_object_at")[0]


class Listener:
    """Receives launches while it is open. Exceptions of the handler come back through `take_error`,
    because they cannot travel through compiled host code.

    parameters: gives (offset, bytes) of each parameter of a kernel: the launch passes one pointer
    per parameter and no sizes.
    """

    def __init__(
        self,
        handler: Callable[[Launch], None],
        parameters: Callable[[str, str], list[tuple[int, int]]],
    ):
        self._handler = handler
        self._parameters = parameters
        self._error: BaseException | None = None
        self._callback = _CALLBACK(self._on_launch)  # kept alive here

    def _on_launch(self, config, image, name, arguments) -> int:  # type: ignore[no-untyped-def]
        try:
            kernel, ptx = name.decode(), modules.ptx_of(image)
            sizes = [size for _, size in self._parameters(ptx, kernel)]
            params = tuple(ctypes.string_at(arguments[i], size) for i, size in enumerate(sizes))
            self._handler(read_launch(config.contents, ptx, kernel, params))
        except BaseException as error:
            self._error = error
            return LAUNCH_FAILURE
        return 0

    def open(self) -> None:
        library.load().fa4_set_launch_callback(self._callback)

    @staticmethod
    def close() -> None:
        library.load().fa4_set_launch_callback(_CALLBACK())

    def take_error(self) -> BaseException | None:
        error, self._error = self._error, None
        return error


def device_attributes(target: Target, num_sms: int) -> list[tuple[int, int]]:
    """Answers to ``cudaDeviceGetAttribute`` (numbers are cudart's ``cudaDeviceAttr``)."""
    return [
        (1, target.threads_per_cta),
        (2, 1024),  # block dimensions
        (3, 1024),
        (4, 64),
        (5, 2**31 - 1),  # grid dimensions
        (6, 65_535),
        (7, 65_535),
        (8, 49_152),  # shared memory per block without opting in
        (10, 32),  # warp size
        (12, target.registers_per_sm),
        (16, num_sms),
        (38, target.l2_bytes),
        (39, target.threads_per_sm),
        (75, target.compute_capability[0]),
        (76, target.compute_capability[1]),
        (81, target.smem_per_sm),
        (97, target.smem_per_cta),
        (106, target.ctas_per_sm),
        (111, target.smem_reserved_per_cta),
    ]


def describe_device(target: Target, num_sms: int) -> None:
    """Tell the run-time library what to answer."""
    for number, value in device_attributes(target, num_sms):
        library.load().fa4_set_device_attribute(number, value)
