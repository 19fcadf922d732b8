"""One kernel's static figures as a value: measured from its cubin, modelled from those counts."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from typing import Any

import attrs

from fa4core.compile.artifact import Artifact
from fa4core.compile.sass import Code, disassemble
from fa4core.plan.target import Rates
from fa4core.report.figures import Figures, Shape, figures_of
from fa4core.report.model import Cycles, modelled

_ALLOC = re.compile(r"tcgen05\.alloc\.[^;]*\],\s*(%?\w+);")


@attrs.frozen
class Kernel:
    """Static figures of a forward kernel.

    Attributes:
        title: Whose kernel it is.
        registers: Of a thread at launch; roles reallocate them.
        stack, local: Bytes of a thread.
        spills: Instructions that load from or store to local memory.
        smem_bytes: Shared memory of a CTA; None where only the launch says it.
        tmem_columns: That it allocates; None where there is no PTX to read it from.
        instructions: Of the whole kernel.
        figures: By (role, "shortest" or "longest"), see `fa4core.report.figures`.
        cycles: Modelled, by "unmasked" and "masked".
        seconds: Of each compilation in this process; empty if it was not compiled here.
    """

    title: str
    registers: int
    stack: int
    local: int
    spills: int
    smem_bytes: int | None
    tmem_columns: int | None
    instructions: int
    figures: dict[tuple[str, str], Figures]
    cycles: dict[str, Cycles]
    seconds: tuple[float, ...] = ()

    @property
    def compile_seconds(self) -> float | None:
        """Median."""
        return statistics.median(self.seconds) if self.seconds else None

    def has_way(self, role: str, way: str) -> bool:
        """Whether a role's loop has this way; "longest" means one besides the shortest."""
        if (role, way) not in self.figures:
            return False
        same = self.figures[role, way].opcodes == self.figures[role, "shortest"].opcodes
        return way == "shortest" or not same

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        found = attrs.asdict(self, filter=lambda a, _: a.name not in ("figures", "cycles"))
        figures = [
            attrs.asdict(f) | {"instructions": f.instructions} for f in self.figures.values()
        ]
        cycles = {kind: c.units | {"bound": c.bound} for kind, c in self.cycles.items()}
        return found | {"figures": figures, "modelled_cycles": cycles}


def examine(
    title: str,
    artifact: Artifact,
    shape: Shape,
    rates: Rates,
    smem_bytes: int | None = None,
    seconds: tuple[float, ...] = (),
) -> Kernel:
    """Read a cubin.

    Raises:
        ValueError: There is no forward kernel in it.
        fa4core.compile.tools.ToolMissing: nvdisasm or cuobjdump is not installed.
    """
    code = _forward(title, disassemble(artifact.cubin))
    used = artifact.resources()[code.kernel]
    figures = figures_of(code, shape)
    missing = [role for role in ("softmax", "mma") if (role, "shortest") not in figures]
    if missing:
        raise ValueError(f"{title}: no key-block loop of {' or '.join(missing)} was found in it")
    opcodes = Counter(i.opcode for i in code.instructions)
    return Kernel(
        title=title,
        registers=used.registers,
        stack=used.stack,
        local=used.local,
        spills=opcodes["LDL"] + opcodes["STL"],
        smem_bytes=smem_bytes,
        tmem_columns=tmem_columns_of(artifact.ptx),
        instructions=len(code.instructions),
        figures=figures,
        cycles={k: modelled(figures, shape, rates, k) for k in ("unmasked", "masked")},
        seconds=seconds,
    )


def _forward(title: str, codes: tuple[Code, ...]) -> Code:
    """The kernel with most matrix products."""
    products = [(sum(i.pipe == "tensor" for i in c.instructions), c) for c in codes]
    count, code = max(products, key=lambda found: found[0], default=(0, None))
    if not count or code is None:
        raise ValueError(
            f"{title}: none of its {len(codes)} kernels has tensor-core instructions; give the "
            "cubin of a forward kernel for SM100"
        )
    return code


def tmem_columns_of(ptx: str) -> int | None:
    """What the kernel allocates, if its PTX is known and says so."""
    found = _ALLOC.search(ptx)
    if found is None:
        return None
    operand = found[1]
    if not operand.isdigit():
        moved = re.findall(rf"mov\.b32\s+{re.escape(operand)},\s*(\d+);", ptx[: found.start()])
        return int(moved[-1]) if moved else None
    return int(operand)
