"""`Kernel`: everything that a compilation depends on, and nothing else.

Its text is the key of the caches in memory and on disk. It is written out of the value itself, so
no field can be forgotten, and it takes plain values only, so neither a tensor nor the identity of a
function can get into it. Used by the launch code of kernels, the caches and `export`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import torch

ALIGNMENT = 16  # bytes; what TMA and vector accesses ask for

_PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
_SOURCES = (Path(__file__).parents[1], Path(__file__).parents[2] / "primitives")


@attrs.frozen
class TensorType:
    """What a kernel knows of a tensor: its extents and strides are run-time values.

    Attributes:
        dtype: As torch spells it, e.g. "bfloat16".
        rank: Number of dimensions; the stride of the last one is 1.
        align: Of its address, bytes.
    """

    dtype: str
    rank: int
    align: int = ALIGNMENT


@attrs.frozen
class Kernel:
    """A kernel to compile.

    Attributes:
        function: The `@cute.jit` host function, "module:name".
        arguments: Types of its run-time arguments (`type_of`), in order.
        spec: Its compile-time argument: an attrs class of plain values.
        target: Name of the target.
        emulated: Whether its host code calls the emulator instead of the driver.
    """

    function: str
    arguments: tuple
    spec: Any
    target: str
    emulated: bool = False

    @property
    def key(self) -> str:
        """The value as text, the same in every process.

        Raises:
            TypeError: There is something in it that is no plain value.
        """
        return json.dumps(attrs.asdict(self), sort_keys=True, default=_refuse)

    @property
    def digest(self) -> str:
        """Of the key, of all source code and of the toolchain: what an entry on disk is for."""
        return _digest(self.key, surroundings())

    def load(self) -> Callable[..., Any]:
        """The host function; imports the DSL."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)


def _refuse(value: object) -> None:
    raise TypeError(
        f"a {type(value).__name__} is part of what a kernel is compiled for; numbers, texts and "
        "attrs classes of them are accepted: pass tensors and functions as run-time arguments"
    )


def type_of(argument: Any, align: int = ALIGNMENT) -> Any:
    """The type of a run-time argument: a tensor, a tuple of tensors, a float or an int.

    Tensors inside a tuple are captured ones, known to be aligned to their elements only.
    """
    if isinstance(argument, torch.Tensor):
        return TensorType(str(argument.dtype).removeprefix("torch."), argument.dim(), align)
    if isinstance(argument, tuple):
        return tuple(type_of(a, a.element_size()) for a in argument)
    return "float32" if isinstance(argument, float) else "int32"


def surroundings() -> str:
    """Digest of what all kernels depend on besides their keys: code, toolchain, machine."""
    return _digest(sources(), *(f"{name} {metadata.version(name)}" for name in _PACKAGES))


@functools.cache
def sources() -> str:
    """Digest of this project's code, and of the machine that host code runs on.

    All of the code, because a list of the files that matter would be wrong one day.
    """
    h = hashlib.sha256(f"{platform.machine()} {platform.system()}".encode())
    for root in _SOURCES:
        for path in sorted((*root.rglob("*.py"), *root.rglob("shim.c"))):
            h.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return h.hexdigest()


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
