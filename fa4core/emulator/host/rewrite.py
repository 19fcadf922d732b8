"""Makes a compiled module's host code call the emulator's run-time library.

The calls are renamed in the module itself. Only functions compiled while the emulator listens are
changed; all others keep calling the DSL's own library, in the same process.
"""

from __future__ import annotations

import re
from typing import Any

from fa4core.emulator.host.library import SOURCE

PREFIX = "fa4_emulated_"
CALLS = frozenset(re.findall(r"^EXPORT .*?CALL\((\w+)\)", SOURCE.read_text(), re.MULTILINE))
_RUNTIME = re.compile(r"_cuda|_cu[A-Z]|cuda_dialect_|CuteDSLRT_")
_REFERENCES = ("callee", "global_name")  # of llvm.call and llvm.mlir.addressof


def rewrite(module: Any) -> None:
    """Rename the run-time calls of an MLIR module, in place."""
    from cutlass._mlir import ir  # noqa: PLC0415

    def visit(operation: Any) -> Any:
        attributes = operation.attributes
        if operation.name == "llvm.func" and attributes["sym_name"].value in CALLS:
            attributes["sym_name"] = ir.StringAttr.get(PREFIX + attributes["sym_name"].value)
        for name in _REFERENCES:
            if name in attributes:
                called = attributes[name].value
                if called in CALLS:
                    attributes[name] = ir.FlatSymbolRefAttr.get(PREFIX + called)
                elif _RUNTIME.match(called):
                    raise NotImplementedError(
                        f"host code calls {called}, which the emulator does not provide"
                    )
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
