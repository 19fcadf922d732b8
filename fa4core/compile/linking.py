"""Host code of a kernel as a shared library, so that loading it imports no compiler.

Where there is no linker, host code stays an object file and the DSL's own loader links it into the
process. Both find the driver through the DSL's run-time library, which is loaded first.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FUNCTION = "fa4core_kernel"  # the name of every packaged host function

_RUNTIME = "libcute_dsl_runtime.so"
_SHARED = 3  # ELF's type of a shared object, at byte 16


def linked(host: bytes) -> bytes:
    """A shared library of an object file; the object file itself if there is no linker."""
    linker = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if linker is None:
        return host
    with tempfile.TemporaryDirectory(prefix="fa4core-link-") as folder:
        given, made = Path(folder) / "host.o", Path(folder) / "host.so"
        given.write_bytes(host)
        command = [linker, "-shared", "-Wl,-Bsymbolic", str(given), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return made.read_bytes() if done.returncode == 0 else host


def is_library(host: bytes) -> bool:
    return host[:4] == b"\x7fELF" and int.from_bytes(host[16:18], "little") == _SHARED


def load_library(host: bytes) -> Callable[..., Any]:
    """The host function of a shared library; imports TVM-FFI only."""
    import tvm_ffi

    _load_runtime()
    with tempfile.TemporaryDirectory(prefix="fa4core-load-") as folder:
        path = Path(folder) / "host.so"
        path.write_bytes(host)
        return tvm_ffi.load_module(str(path))[FUNCTION]


@functools.cache
def _load_runtime() -> None:
    import tvm_ffi

    for path in (tvm_ffi.libinfo.find_libtvm_ffi(), runtime_library()):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def runtime_library() -> Path:
    """The DSL's run-time library, found without importing the DSL."""
    named = os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep)
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = [] if spec is None else list(spec.submodule_search_locations or ())
    installed = [path for root in roots for path in sorted(Path(root).glob(f"cu*/lib/{_RUNTIME}"))]
    for path in (*map(Path, named), *installed):
        if path.name == _RUNTIME and path.exists():
            return path
    raise ModuleNotFoundError(
        f"{_RUNTIME} was not found: pip install nvidia-cutlass-dsl, or name the file in "
        "CUTE_DSL_LIBS"
    )
