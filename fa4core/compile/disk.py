"""The folder of compiled kernels that processes share.

`FA4CORE_CACHE_DIR` names another folder, and `FA4CORE_CACHE_DIR=off` keeps nothing on disk; the
default is `fa4core/kernels` in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`). An
entry is written beside its place and then renamed, so readers see all of it or nothing, and of two
writers of one kernel the last one wins. A folder that can't be written is no error: one warning.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from pathlib import Path

from fa4core.compile.kernel import Kernel
from fa4core.compile.package import DamagedError, Package

VARIABLE = "FA4CORE_CACHE_DIR"
OFF = "off"


def folder() -> Path | None:
    """Where compiled kernels are kept, or None for nowhere."""
    named = os.environ.get(VARIABLE)
    if named == OFF:
        return None
    if named:
        return Path(named)
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "fa4core" / "kernels"


def read(kernel: Kernel) -> Package | None:
    """The stored package of a kernel, or None.

    Raises:
        DamagedError: What is stored is no package of this kernel; to be replaced.
    """
    place = _place(kernel)
    if place is None:
        return None
    try:
        data = place.read_bytes()
    except OSError:
        return None
    package = Package.from_bytes(data)
    if package.key != kernel.key:
        raise DamagedError(f"{place} is of another kernel")
    return package


def write(kernel: Kernel, package: Package) -> None:
    """Store a package."""
    place = _place(kernel)
    if place is None:
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=".writing-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(package.to_bytes())
            os.replace(name, place)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        warnings.warn(
            f"compiled kernels can't be kept in {place.parent} ({error}), so the next process "
            f"compiles again. Set {VARIABLE} to a folder that can be written, or to {OFF!r}.",
            stacklevel=2,
        )


def _place(kernel: Kernel) -> Path | None:
    root = folder()
    return None if root is None else root / f"{kernel.digest}.zip"
