"""Builds (once, cached) and loads the run-time library that emulated host code calls."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("shim.c")
_FLAGS = ("-std=gnu11", "-Wall", "-Werror", "-O1", "-shared", "-fPIC", "-fvisibility=hidden")


def _cache_folder() -> Path:
    root = os.environ.get("FA4CORE_CACHE") or Path.home() / ".cache" / "fa4core"
    folder = Path(root) / "native"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compiler() -> str:
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang", "g++"):
        if name and shutil.which(name):
            return name
    raise RuntimeError(
        "the emulator builds a small C library on first use and found no compiler; "
        "install one (Debian: apt-get install g++) or set CC"
    )


@functools.cache
def runtime_library() -> Path:
    """Path of the built library. A changed source or compiler line gives another file."""
    compiler = _compiler()
    key = hashlib.sha256(SOURCE.read_bytes() + repr((compiler, _FLAGS)).encode()).hexdigest()[:16]
    path = _cache_folder() / f"runtime-shim-{key}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            command = [compiler, "-x", "c", *_FLAGS, str(SOURCE), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"building the emulator's runtime failed:\n{done.stderr}")
            built.rename(path)  # atomic: several processes may build at once
    return path


@functools.cache
def load() -> ctypes.CDLL:
    """The library, loaded; the compiled host code finds this same copy by its path."""
    return ctypes.CDLL(str(runtime_library()))
