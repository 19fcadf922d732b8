"""Which PTX belongs to a fat binary that host code loads.

The host code holds the machine code only. Every function compiled while the emulator listens has
both in memory, so the PTX is the one whose cubin occurs in the loaded image.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

_FATBIN_MAGIC = 0xBA55ED50
_BY_CUBIN: dict[bytes, str] = {}
_BY_IMAGE: dict[int, tuple[bytes, str]] = {}


def remember(compiled: Any) -> None:
    """Observer of compilations (`dsl_settings(observer=...)`)."""
    if compiled.__cubin__ and compiled.__ptx__:
        know(bytes(compiled.__cubin__), compiled.__ptx__)


def know(cubin: bytes, ptx: str) -> None:
    """Say which PTX a machine code was made from."""
    _BY_CUBIN[cubin] = ptx


def cubin_of(ptx: str) -> bytes:
    """The machine code that was made from a PTX."""
    for cubin, known in _BY_CUBIN.items():
        if known == ptx:
            return cubin
    raise KeyError("this PTX was not compiled while the emulator listened")


def ptx_of(image: int) -> str:
    """PTX of the fat binary at an address."""
    header = ctypes.string_at(image, 16)
    magic, _, header_size, payload_size = struct.unpack("<IHHQ", header)
    if magic != _FATBIN_MAGIC:
        raise RuntimeError(f"the host code loaded something that is no fat binary ({magic:#x})")
    data = ctypes.string_at(image, header_size + payload_size)
    known = _BY_IMAGE.get(image)
    if known is not None and known[0] == data:  # an address may be used again after a free
        return known[1]
    for cubin, ptx in _BY_CUBIN.items():
        if cubin in data:
            _BY_IMAGE[image] = (data, ptx)
            return ptx
    raise RuntimeError(
        "a kernel was launched that was not compiled while the emulator listened: compile it "
        "inside `with emulator(...)` or with `compile_for_emulator`; the DSL's own disk cache does "
        "not keep its PTX"
    )
