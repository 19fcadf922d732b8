"""`cross_compile`: one CuTe DSL function, one target, with or without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from fa4core.compile.artifact import Artifact
from fa4core.compile.environment import dsl_settings, exclusive
from fa4core.compile.targets import Target, resolve


@attrs.frozen
class Compiled:
    """A compiled function: call it like the function it came from, or read its artifact."""

    artifact: Artifact
    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def cross_compile(
    function: Callable[..., Any],
    *args: Any,
    target: str | Target = "sm100",
    options: str = "",
    runtime: Path | None = None,
    rewrite: Callable[[Any], None] | None = None,
    line_info: bool = False,
    **kwargs: Any,
) -> Compiled:
    """Compile a ``@cute.jit`` function for `target`; neither a GPU nor a driver is needed.

    args, kwargs: as for ``cute.compile``; fake tensors (``cutlass.cute.runtime.make_fake_tensor``)
    do. options: the compiler's, e.g. ``"--enable-tvm-ffi"`` to call the result with torch tensors.
    runtime, rewrite: see `dsl_settings`; by default the host code calls the driver when called.
    `fa4core.emulator.session.compile_for_emulator` passes the emulator's.
    """
    chosen = resolve(target)
    with exclusive, dsl_settings(chosen, runtime, rewrite, line_info=line_info):
        from cutlass import cute

        compiled = cute.compile(function, *args, options=options, **kwargs)
    return Compiled(artifact_of(compiled, chosen), compiled)


def artifact_of(compiled: Any, target: Target) -> Artifact:
    """The artifact of a function that the DSL compiled inside `dsl_settings`."""
    return Artifact(
        target=target,
        name=compiled.function_name,
        ptx=compiled.__ptx__ or "",
        cubin=bytes(compiled.__cubin__ or b""),
    )
