"""The folder of compiled kernels that processes share.

`FA4CORE_CACHE_DIR` names another folder, and `FA4CORE_CACHE_DIR=off` keeps nothing on disk; the
default is `fa4core/kernels` in the user's cache folder (`XDG_CACHE_HOME`, else `~/.cache`). An
entry is written beside its place and then renamed, so readers see all of it or nothing, and of two
writers of one kernel the last one wins. A folder that can't be written is no error: one warning.

The folder is bounded: whoever writes removes the entries that were used longest ago, by their time
of modification, which reading sets. Entries that vanish meanwhile are compiled anew.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import warnings
from pathlib import Path

from fa4core.compile.kernel import Kernel
from fa4core.compile.package import DamagedError, Package

VARIABLE = "FA4CORE_CACHE_DIR"
OFF = "off"
LIMIT = "FA4CORE_CACHE_MB"
DEFAULT_MB = 1024
_WRITING = ".writing-"
_ABANDONED = 3600.0  # seconds after which a file that is being written has no writer


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
    with contextlib.suppress(OSError):  # a folder that can only be read
        os.utime(place)
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
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=_WRITING)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(package.to_bytes())
            os.replace(name, place)
            _prune(place)
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


def most_bytes() -> float:
    """How large the folder may be.

    Raises:
        ValueError: What the variable holds is no number of at least 0.
    """
    given = os.environ.get(LIMIT) or str(DEFAULT_MB)
    try:
        most = float(given)
    except ValueError:
        most = -1.0
    if not most >= 0:
        raise ValueError(f"{LIMIT}={given!r}; megabytes of at least 0 are accepted")
    return most * 1e6


def _prune(newest: Path) -> None:
    """Remove what was used longest ago until the folder is small enough; never `newest`.

    Several processes may do so at once: one that finds a file gone counts it as removed.
    """
    entries, total = [], 0
    for file in os.scandir(newest.parent):
        with contextlib.suppress(FileNotFoundError):
            about = file.stat()
            if file.name.startswith(_WRITING) and time.time() - about.st_mtime > _ABANDONED:
                os.unlink(file)
            elif file.name.endswith(".zip"):
                total += about.st_size
                if file.name != newest.name:
                    entries.append((about.st_mtime, about.st_size, file.path))
    most = most_bytes()
    for _, size, path in sorted(entries):
        if total <= most:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        total -= size


def _place(kernel: Kernel) -> Path | None:
    root = folder()
    return None if root is None else root / f"{kernel.digest}.zip"
