"""Builds (once, cached) and loads the run-time library that emulated host code calls."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
import tempfile
from pathlib import Path

from fa4core.emulator import native

SOURCE = Path(__file__).with_name("shim.c")
_FLAGS = ("-x", "c", "-std=gnu11", "-Wall", "-Werror", "-O1", "-shared", "-fPIC")


@functools.cache
def runtime_library() -> Path:
    """Path of the built library. A changed source or compiler line gives another file."""
    command = [*native.compiler(), *_FLAGS, "-fvisibility=hidden"]
    key = hashlib.sha256(SOURCE.read_bytes() + repr(command).encode()).hexdigest()[:16]
    path = native.cache_dir() / f"runtime-{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / path.name
            done = subprocess.run(
                [*command, str(SOURCE), "-o", str(built)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                raise RuntimeError(f"building the emulator's runtime failed:\n{done.stderr}")
            built.rename(path)  # atomic: several processes may build at once
    return path


@functools.cache
def load() -> ctypes.CDLL:
    """The library, loaded; the compiled host code finds this same copy by its path."""
    return ctypes.CDLL(str(runtime_library()))
