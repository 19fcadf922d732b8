"""Builds a native core with the system's C++ compiler on first use, and loads it through ctypes.

The library lies in the user's cache, named by the hash of its sources, the compiler and the
flags; it is built elsewhere and renamed into place, so that processes that start together never
see half of it.
Who uses it: `fa4core.emulator.machine`, and `fa4core.timing.replay` for a core of its own.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
FLAGS = ["-std=c++20", "-O3", "-march=native", "-fPIC", "-fno-strict-aliasing", "-fno-math-errno"]
FLAGS += ["-fno-trapping-math", "-fvisibility=hidden"]
CONTRACT = {"gemm.cpp": "fast"}  # everything else rounds as the PTX says


class CompilerMissing(RuntimeError):
    """There is no C++ compiler to build the emulator's core with."""


def compiler() -> list[str]:
    """The command of a C++20 compiler: $CXX, or the first of c++, g++, clang++."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise CompilerMissing(
        "the emulator builds its core on first use and found no C++ compiler (CXX, c++, g++ or "
        "clang++). Install one, e.g. `apt install g++` (12 or newer), `dnf install gcc-c++` or "
        "`conda install -c conda-forge gxx`, or name it in the environment variable CXX."
    )


def cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "fa4core" / "emulator"


def _processor() -> str:
    """What -march=native depends on, so that a cache on a shared disk is safe."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return sys.platform
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _digest(command: list[str], sources: Path = SOURCES) -> str:
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    h = hashlib.sha256()
    h.update(repr((command, FLAGS, CONTRACT, version.stdout, _processor())).encode())
    for path in sorted(sources.iterdir()):
        if path.suffix in (".cpp", ".h"):
            h.update(path.name.encode() + b"\0" + path.read_bytes())
    return h.hexdigest()[:20]


def _object(command: list[str], source: Path, headers: bytes) -> Path:
    """The object file of one source; kept, so that a changed file is all that is rebuilt."""
    line = [*command, *FLAGS, f"-ffp-contract={CONTRACT.get(source.name, 'off')}"]
    key = hashlib.sha256(repr((line, _processor())).encode() + headers + source.read_bytes())
    target = cache_dir() / "objects" / f"{source.stem}-{key.hexdigest()[:20]}.o"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(f".{os.getpid()}")
        _run([*line, "-c", str(source), "-o", str(part)])
        os.replace(part, target)
    return target


def _compile(command: list[str], sources: Path, folder: Path) -> Path:
    headers = b"".join(path.read_bytes() for path in sorted(sources.glob("*.h")))
    objects = [str(_object(command, source, headers)) for source in sorted(sources.glob("*.cpp"))]
    library = folder / "core.so"
    _run([*command, "-shared", *objects, "-o", str(library)])
    return library


def _run(line: list[str]) -> None:
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            "the emulator's core does not compile (a C++20 compiler is needed, g++ 12 or newer):\n"
            + shlex.join(line)
            + "\n"
            + done.stderr[-4000:]
        )


def build(sources: Path = SOURCES) -> Path:
    """The path of a built library; builds it if this version is not in the cache."""
    command = compiler()
    library = cache_dir() / f"core-{_digest(command, sources)}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        # From a copy: sources that change while they are compiled must not spoil the cache.
        copied = Path(shutil.copytree(sources, Path(folder) / "sources"))
        library = cache_dir() / f"core-{_digest(command, copied)}.so"
        os.replace(_compile(command, copied, Path(folder)), library)
    return library


@functools.cache
def library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(build()))
    u32, u64, pointer, text = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_char_p
    signatures = {
        "emu_create": (pointer, [text, u64, u32, u32]),
        "emu_destroy": (None, [pointer]),
        "emu_register": (None, [pointer, u64, u64, text, ctypes.c_int]),
        "emu_forget": (None, [pointer, u64]),
        "emu_launch": (
            ctypes.c_int,
            [pointer, text, u64, text, ctypes.POINTER(u32), u32, text, u64],
        ),
        "emu_result": (text, [pointer]),
        "emu_trace": (ctypes.POINTER(ctypes.c_int32), [pointer, ctypes.POINTER(u64)]),
        "emu_params": (text, [pointer, text, u64, text]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib
