"""The one place that knows how CuTe DSL is configured.

The DSL keeps process-wide singletons whose settings come from environment variables, reads
``sys.argv`` at every compilation, and asks the driver for what is not set. `dsl_settings` sets all
of that for one block of code and puts it back, so nothing else in the project touches it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fa4core.compile.targets import Target

#: Held by whoever compiles, loads a kernel or launches one in the emulator: the DSL's settings and
#: the emulator belong to the process. A session that is open does not hold it between launches.
exclusive = threading.RLock()

_LIBRARIES = "CUTE_DSL_LIBS"  # the run-time libraries that compiled host code is linked against
_OBSERVERS: list[Callable[[Any], None]] = []  # called with each compiled function
_REWRITES: list[Callable[[Any], None]] = []  # called with each compiled module


@contextlib.contextmanager
def hidden_arguments() -> Iterator[None]:
    """Hide the command line: the DSL parses it when it compiles, and ``-h`` would end us."""
    saved = sys.argv
    sys.argv = saved[:1]
    try:
        yield
    finally:
        sys.argv = saved


def import_dsl() -> ModuleType:
    """Import CuTe DSL (no GPU needed) and make it independent of the command line."""
    if importlib.util.find_spec("cutlass") is None:
        raise ModuleNotFoundError(
            "CuTe DSL is not installed: pip install nvidia-cutlass-dsl (Linux only)"
        )
    with hidden_arguments():
        import cutlass
        from cutlass.base_dsl.compiler import Compiler
        from cutlass.base_dsl.dsl import BaseDSL
        from cutlass.cutlass_dsl.cuda_jit_executor import (
            CudaDialectJitCompiledFunction,
        )
    if not hasattr(BaseDSL.diagnostic, "__wrapped__"):
        _wrap_diagnostic(BaseDSL)
        _wrap_construction(CudaDialectJitCompiledFunction)
        _wrap_compile(Compiler)
    return cutlass


def _wrap_diagnostic(dsl: Any) -> None:
    original = dsl.diagnostic

    def diagnostic(self: Any) -> None:
        with hidden_arguments():
            original(self)

    diagnostic.__wrapped__ = original  # type: ignore[attr-defined]
    dsl.diagnostic = diagnostic


def _wrap_construction(function_type: Any) -> None:
    """Tell observers of every compiled function: artifacts exist only in memory, at that moment."""
    original = function_type.__init__

    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        for observer in tuple(_OBSERVERS):
            observer(self)

    construct.__wrapped__ = original  # type: ignore[attr-defined]
    function_type.__init__ = construct


def _wrap_compile(compiler: Any) -> None:
    original = compiler.compile

    def compile_(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = original(self, *args, **kwargs)
        for rewrite in tuple(_REWRITES):
            rewrite(module)
        return module

    compiler.compile = compile_


def _known_libraries() -> str | None:
    from cutlass.base_dsl.env_manager import get_prefix_dsl_libs

    return get_prefix_dsl_libs("CUTE_DSL")


def _singletons() -> list[Any]:
    """Every DSL front of this process (CuTe DSL and its experimental sibling)."""
    from cutlass.base_dsl.dsl import DSLSingletonMeta
    from cutlass.cutlass_dsl import CuTeDSL

    CuTeDSL._get_dsl()
    return list(DSLSingletonMeta._instances.values())


def _forget_environment() -> None:
    from cutlass.base_dsl import env_manager

    env_manager.get_str_env_var.cache_clear()


@contextlib.contextmanager
def dsl_settings(
    target: Target,
    runtime: Path | None = None,
    rewrite: Callable[[Any], None] | None = None,
    observer: Callable[[Any], None] | None = None,
    line_info: bool = False,
) -> Iterator[None]:
    """Compile everything inside the block for `target`, keeping PTX and cubin in memory.

    runtime: library that host code is linked against besides the DSL's own (the emulator's).
    rewrite: changes each compiled module before its host code is made executable.
    observer: called with every function compiled inside the block.
    line_info: emit .loc, so that reports name source lines.
    """
    import_dsl()
    with (
        tempfile.TemporaryDirectory(prefix="fa4core-dsl-") as folder,
        contextlib.ExitStack() as undo,
    ):
        if runtime is not None:
            libraries = os.pathsep.join(filter(None, (_known_libraries(), str(runtime))))
            undo.callback(_restore_variable, _LIBRARIES, os.environ.get(_LIBRARIES))
            os.environ[_LIBRARIES] = libraries
            _forget_environment()
        for dsl in _singletons():
            settings = {
                "_arch": target.arch,
                "keep_ptx": True,
                "keep_cubin": True,
                "dump_dir": folder,
                "lineinfo": line_info,
                "no_cache": True,
                "jit_cache_max_elems": 0,
            }
            if runtime is not None:
                settings["shared_libs"] = libraries
            undo.callback(
                _restore_attributes, dsl.envar, {k: getattr(dsl.envar, k) for k in settings}
            )
            _restore_attributes(dsl.envar, settings)
        for function, registered in ((observer, _OBSERVERS), (rewrite, _REWRITES)):
            if function is not None:
                registered.append(function)
                undo.callback(registered.remove, function)
        yield


def _restore_attributes(holder: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(holder, name, value)


def _restore_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
    _forget_environment()
