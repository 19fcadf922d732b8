"""`Package`: a compiled kernel as bytes, with everything that is needed to launch or emulate it.

A zip file, whose checksums tell a damaged one. The caches store it, `export` ships it. Opening one
compiles nothing: the host function is linked into the process and called through TVM-FFI.
"""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from fa4core.compile.artifact import Artifact
from fa4core.compile.environment import dsl_settings, exclusive, import_dsl
from fa4core.compile.linking import FUNCTION, is_library, load_library
from fa4core.compile.targets import resolve


class DamagedError(ValueError):
    """Bytes that are no package, or no longer one."""


@attrs.frozen(slots=False, eq=False)
class Package:
    """A compiled kernel.

    Attributes:
        key: `Kernel.key` of what it was compiled from.
        target: Name of the target.
        emulated: Whether its host code calls the emulator.
        host: Shared library or object file of the host function, the machine code inside.
        ptx, cubin: Of the kernel, for the emulator and for reports.
    """

    key: str
    target: str
    emulated: bool
    host: bytes
    ptx: str
    cubin: bytes

    def to_bytes(self) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for field in attrs.fields(Package):
                value = getattr(self, field.name)
                archive.writestr(field.name, value if isinstance(value, bytes) else str(value))
        return file.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Package:
        """Read what `to_bytes` wrote.

        Raises:
            DamagedError: It didn't.
        """
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                parts = {field.name: archive.read(field.name) for field in attrs.fields(cls)}
        except (zipfile.BadZipFile, KeyError, EOFError, OSError, ValueError) as error:
            raise DamagedError(f"{len(data)} bytes are no compiled kernel: {error}") from error
        return cls(
            key=parts["key"].decode(),
            target=parts["target"].decode(),
            emulated=parts["emulated"] == b"True",
            host=parts["host"],
            ptx=parts["ptx"].decode(),
            cubin=parts["cubin"],
        )

    @property
    def artifact(self) -> Artifact:
        return Artifact(resolve(self.target), FUNCTION, self.ptx, self.cubin)

    @cached_property
    def function(self) -> Callable[..., Any]:
        """The host function, linked into this process: takes torch tensors, launches on their
        device and on its current stream."""
        if is_library(self.host):
            return load_library(self.host)
        import_dsl()
        from cutlass.cute.runtime import load_module

        runtime = None
        if self.emulated:
            from fa4core.emulator.host import library, modules

            modules.know(self.cubin, self.ptx)
            runtime = library.runtime_library()
        with (
            exclusive,
            dsl_settings(resolve(self.target), runtime),
            tempfile.TemporaryDirectory(prefix="fa4core-load-") as folder,
        ):
            path = Path(folder) / "host.o"
            path.write_bytes(self.host)
            return load_module(str(path), enable_tvm_ffi=True)[FUNCTION]
