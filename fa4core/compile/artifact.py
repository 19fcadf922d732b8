"""What a compilation produced, as a value: PTX, cubin, and what can be read out of them.

Resource use is ``cuobjdump -res-usage``, SASS comes from ``nvdisasm``; both run on first use only.
Used by the planner (does it spill?), by models of time, by tests and by the docs.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping

import attrs

from fa4core.compile.targets import Target
from fa4core.compile.tools import run_on_cubin

_ENTRY = re.compile(r"^\s*(?:\.visible\s+)?\.entry\s+([\w$]+)", re.MULTILINE)
_USAGE = re.compile(r"Function ([\w$]+):\s*\n\s*(.*)")
_FIELD = re.compile(r"([A-Z]+)(?:\[\d+\])?:(\d+)")
_SECTION = re.compile(r"^\s*\.section\s+\.text\.([\w$]+)", re.MULTILINE)
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)([\w.]*)", re.MULTILINE
)


@attrs.frozen
class Resources:
    """Use of one kernel, per thread (registers, stack, local) or per CTA (shared), in bytes."""

    registers: int
    stack: int
    shared: int  # static only; dynamic shared memory is a launch argument
    local: int
    constant: int

    @property
    def spills(self) -> bool:
        return self.stack > 0 or self.local > 0


@attrs.frozen
class SassStatistics:
    """Instruction counts of one kernel's machine code (static, not executed counts)."""

    instructions: Mapping[str, int]  # by opcode without modifiers, e.g. "MUFU"
    modifiers: Mapping[str, int]  # by full opcode, e.g. "MUFU.EX2"

    @property
    def total(self) -> int:
        return sum(self.instructions.values())


@attrs.frozen
class Artifact:
    """A module compiled for one target."""

    target: Target
    name: str
    ptx: str
    cubin: bytes

    @property
    def kernels(self) -> tuple[str, ...]:
        """Entry names, in the order of the PTX."""
        return tuple(_ENTRY.findall(self.ptx))

    def resources(self) -> Mapping[str, Resources]:
        """Resource use by kernel; needs cuobjdump (`ToolMissing` says how to install it)."""
        return _resources(self.cubin)

    def sass(self) -> str:
        """Machine code as text; needs nvdisasm."""
        return _sass(self.cubin)

    def sass_statistics(self) -> Mapping[str, SassStatistics]:
        """Instruction counts by kernel; needs nvdisasm."""
        return _sass_statistics(self.cubin)


@functools.lru_cache(maxsize=64)
def _resources(cubin: bytes) -> Mapping[str, Resources]:
    text = run_on_cubin("cuobjdump", cubin, "-res-usage")
    found: dict[str, Resources] = {}
    for kernel, line in _USAGE.findall(text):
        fields = Counter[str]()
        for field, value in _FIELD.findall(line):
            fields[field] += int(value)
        found[kernel] = Resources(
            registers=fields["REG"],
            stack=fields["STACK"],
            shared=fields["SHARED"],
            local=fields["LOCAL"],
            constant=fields["CONSTANT"],
        )
    return found


@functools.lru_cache(maxsize=16)
def _sass(cubin: bytes) -> str:
    return run_on_cubin("nvdisasm", cubin, "--print-code")


@functools.lru_cache(maxsize=64)
def _sass_statistics(cubin: bytes) -> Mapping[str, SassStatistics]:
    text = _sass(cubin)
    sections = list(_SECTION.finditer(text))
    found: dict[str, SassStatistics] = {}
    for section, following in zip(sections, [*sections[1:], None], strict=True):
        code = text[section.end() : following.start() if following else len(text)]
        pairs = _INSTRUCTION.findall(code)
        found[section.group(1)] = SassStatistics(
            instructions=Counter(opcode for opcode, _ in pairs),
            modifiers=Counter(opcode + rest for opcode, rest in pairs),
        )
    return found
