"""Cross-compiles CuTe DSL functions for a named target on a machine with no GPU and no driver.

It knows the DSL and NVIDIA's object tools, nothing about attention, but for `aot`, which exports
variants. Used by the emulator's host side, by the kernels' launch code, and by anyone who wants
PTX, SASS or resource use as values.
"""

from typing import Any

from fa4core.compile.artifact import Artifact, Resources, SassStatistics
from fa4core.compile.cache import Statistics, statistics
from fa4core.compile.cross import Compiled, cross_compile
from fa4core.compile.environment import dsl_settings, import_dsl
from fa4core.compile.targets import SM90, SM100, SM103, TARGETS, Target, resolve

__all__ = [
    "SM90",
    "SM100",
    "SM103",
    "TARGETS",
    "Artifact",
    "Compiled",
    "Resources",
    "SassStatistics",
    "Statistics",
    "Target",
    "cross_compile",
    "dsl_settings",
    "export",
    "import_dsl",
    "load",
    "resolve",
    "statistics",
]


def __getattr__(name: str) -> Any:
    """`export` and `load`, imported on use: they know variants, which know this package."""
    if name in ("export", "load"):
        from fa4core.compile import aot

        return getattr(aot, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
