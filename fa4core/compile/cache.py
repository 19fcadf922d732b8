"""Every kernel that this process uses: compiled at most once, and by one process at most once.

`obtain` looks in memory, then on disk (`fa4core.compile.disk`), then compiles. A bad entry on disk
is compiled anew and replaced. `statistics` counts; tests and users read from it what was compiled.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import attrs

from fa4core.compile import disk
from fa4core.compile.kernel import Kernel
from fa4core.compile.package import DamagedError, Package

MOST = 256  # kernels kept in memory

_lock = threading.RLock()
_packages: OrderedDict[str, Package] = OrderedDict()


@attrs.frozen
class Statistics:
    """What `obtain` has done in this process.

    Attributes:
        compiled: Kernels compiled.
        read: Kernels read from disk.
        reused: Kernels found in memory.
        repaired: Bad entries on disk that were compiled anew (they count as compiled, too).
    """

    compiled: int = 0
    read: int = 0
    reused: int = 0
    repaired: int = 0

    @property
    def kernels(self) -> int:
        """Times that a kernel was not in memory."""
        return self.compiled + self.read


_counts = Statistics()


def statistics() -> Statistics:
    """The counts so far."""
    return _counts


def obtain(kernel: Kernel) -> Package:
    """The package of a kernel, from memory, from disk or from the compiler."""
    with _lock:
        known = _packages.get(kernel.key)
        if known is not None:
            _packages.move_to_end(known.key)
            _count("reused")
            return known
        package = _stored(kernel)
        if package is None:
            from fa4core.compile.build import build  # imports the DSL

            package = build(kernel)
            _count("compiled")
            disk.write(kernel, package)
        else:
            _count("read")
        add(package)
        return package


def add(package: Package) -> None:
    """Make a package known, as if it had just been compiled."""
    with _lock:
        _packages[package.key] = package
        while len(_packages) > MOST:
            _packages.popitem(last=False)


def is_empty() -> bool:
    """Whether no kernel is in memory."""
    return not _packages


def clear() -> None:
    """Forget the kernels in memory; those on disk stay."""
    with _lock:
        _packages.clear()


def _stored(kernel: Kernel) -> Package | None:
    try:
        return disk.read(kernel)
    except DamagedError:
        _count("repaired")
        return None


def _count(name: str) -> None:
    global _counts  # noqa: PLW0603
    _counts = attrs.evolve(_counts, **{name: getattr(_counts, name) + 1})
