"""Finds and runs NVIDIA's object tools on cubins that we compiled ourselves.

``cuobjdump`` and ``nvdisasm`` come from the pip packages of the same name; a CUDA toolkit's or
Triton's copies serve as well. They are optional: what needs them says what to install.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path


class ToolMissing(RuntimeError):
    """An optional tool is not installed; the message says how to get it."""


@functools.cache
def find_tool(name: str) -> Path:
    """Path of ``cuobjdump`` or ``nvdisasm``."""
    for candidate in _candidates(name):
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    raise ToolMissing(
        f"{name} was not found. Install it with: pip install nvidia-cuda-{name} "
        "(a CUDA toolkit's bin folder on PATH, or CUDA_HOME, serves as well)"
    )


def _candidates(name: str) -> list[Path]:
    found: list[Path] = []
    try:
        files = metadata.distribution(f"nvidia-cuda-{name}").files or []
        found += [Path(str(file.locate())) for file in files if file.name == name]
    except metadata.PackageNotFoundError:
        pass
    on_path = shutil.which(name)
    if on_path:
        found.append(Path(on_path))
    if home := os.environ.get("CUDA_HOME", os.environ.get("CUDA_PATH")):
        found.append(Path(home) / "bin" / name)
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin:
        found.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / name)
    return found


def run_on_cubin(name: str, cubin: bytes, *options: str) -> str:
    """Standard output of one tool over one cubin."""
    tool = find_tool(name)
    with tempfile.TemporaryDirectory(prefix="fa4core-cubin-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run(
            [str(tool), *options, str(path)], capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        raise RuntimeError(f"{tool} failed on the cubin: {done.stderr.strip()}")
    return done.stdout
