"""What may import what, as `docs/architecture.md` says; read from the files, importing none."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TARGETS = ("fa4core.sm90", "fa4core.sm100")
PASSES = ("fa4core.forward", "fa4core.backward")

#: A folder, and what nothing in it may import.
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "primitives": ("fa4core", "variants", "cutlass"),
    "fa4core/lowering": (*TARGETS, *PASSES, "fa4core.plan"),
    "fa4core/plan": (*TARGETS, *PASSES, "cutlass"),
    "fa4core/reference": (*TARGETS, *PASSES, "cutlass"),
    "fa4core/pipeline": (*TARGETS, *PASSES),
    "fa4core/forward": (*TARGETS, "fa4core.backward"),
    "fa4core/backward": TARGETS,
    "fa4core/sm90": ("fa4core.sm100",),
    "fa4core/sm100": ("fa4core.sm90",),
    "fa4core/emulator": (*TARGETS, *PASSES, "fa4core.plan"),
}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_folder_imports_what_it_may(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        for name in imported(path):
            above = [f for f in FORBIDDEN[folder] if name == f or name.startswith(f"{f}.")]
            assert not above, f"{path.relative_to(ROOT)} imports {name}"
