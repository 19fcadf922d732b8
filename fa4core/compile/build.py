"""Compiles a `Kernel` into a `Package`: the only place where the project's kernels are compiled."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

from fa4core.compile.cross import cross_compile
from fa4core.compile.environment import import_dsl
from fa4core.compile.kernel import Kernel, TensorType
from fa4core.compile.linking import FUNCTION, linked
from fa4core.compile.package import Package


def build(kernel: Kernel, line_info: bool = False) -> Package:
    """Compile a kernel; needs the DSL, but neither a GPU nor a driver.

    line_info: keep source lines in the PTX and PTX lines in the machine code; the code is the same.
    """
    import_dsl()
    from cutlass.cute.runtime import make_fake_stream

    for_emulator: dict[str, Any] = {}
    if kernel.emulated:
        from fa4core.emulator.host import library
        from fa4core.emulator.host.rewrite import rewrite

        for_emulator = {"runtime": library.runtime_library(), "rewrite": rewrite}
    with warnings.catch_warnings():
        # The DSL takes tuples of tensors well, and says that it may not.
        warnings.filterwarnings(
            "ignore", "Argument (captured|grad_captured|pages) .* cannot be converted"
        )
        compiled = cross_compile(
            kernel.load(),
            *map(_stand_in, kernel.arguments),
            make_fake_stream(use_tvm_ffi_env_stream=True),
            kernel.spec,
            target=kernel.target,
            line_info=line_info,
            options="--enable-tvm-ffi",
            **for_emulator,
        )
    with tempfile.TemporaryDirectory(prefix="fa4core-build-") as folder:
        path = Path(folder) / "host.o"
        exported: Any = compiled.function
        exported.export_to_c(str(path), FUNCTION, export_only_tvm_ffi_symbols=True)
        host = path.read_bytes() if kernel.emulated else linked(path.read_bytes())
    artifact = compiled.artifact
    return Package(kernel.key, kernel.target, kernel.emulated, host, artifact.ptx, artifact.cubin)


def _stand_in(argument: Any) -> Any:
    """What the DSL compiles for, instead of a value of an argument's type."""
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import make_fake_tensor

    if isinstance(argument, tuple):
        return tuple(map(_stand_in, argument))
    if isinstance(argument, TensorType):
        shape = tuple(cute.sym_int32() for _ in range(argument.rank))
        strides = (*(cute.sym_int64() for _ in shape[1:]), 1)
        name = argument.dtype.capitalize().replace("Bfloat", "BFloat")
        return make_fake_tensor(
            getattr(cutlass, name), shape, strides, assumed_align=argument.align
        )
    return cutlass.Float32(1.0) if argument == "float32" else cutlass.Int32(1)
