"""Machine code as values: the instructions of a kernel, their labels, and the pipe of each.

Reads what nvdisasm prints. It knows the instruction set, no kernel. `fa4core.compile.flow` finds
loops and paths in it; the static report counts what lies on them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

import attrs

from fa4core.compile.tools import run_on_cubin

#: Pipes in the order in which tables show them.
PIPES = (
    "FMA x2", "FMA", "ALU", "MUFU", "TMEM", "LSU", "tensor", "TMA", "barrier", "uniform", "control",
)  # fmt: skip

# Pipe by opcode. MUFU stands for the unit that also rounds, counts bits and converts between floats
# and integers (Nsight Compute's documentation calls it XU).
# Whatever begins with U and is not listed runs on the uniform datapath; the rest is integer,
# comparison, selection, movement and conversion work of the ALU.
_OPCODES = {
    "FMA x2": "FFMA2 FMUL2 FADD2",
    "FMA": "FFMA FMUL FADD IMAD HFMA2 HADD2 HMUL2 IDP XMAD",
    "MUFU": "MUFU FRND F2I I2F F2F POPC FLO BREV",
    "TMEM": "LDTM STTM UTCCP UTCSHIFT",
    "LSU": "LD LDG LDS LDL LDC LDSM LDGSTS ST STG STS STL STSM ATOM ATOMG ATOMS RED REDG REDUX "
    "SHFL LDCU MEMBAR CCTL UCGABAR_WAIT",
    "tensor": "UTCHMMA UTCQMMA UTCIMMA UTCOMMA UTCMXQMMA HMMA QMMA IMMA HGMMA",
    "TMA": "UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UTMACMDFLUSH UBLKCP UBLKRED UBLKPF",
    "barrier": "SYNCS UTCBAR BAR UCGABAR_ARV DEPBAR LDGDEPBAR ARRIVES FENCE NANOSLEEP",
    "uniform": "R2UR S2UR REDUX VOTEU",
    "control": "BRA BRX JMP JMX EXIT CALL RET BSSY BSYNC BREAK WARPSYNC YIELD NOP ELECT BPT KILL "
    "WARPGROUP USETMAXREG UVIRTCOUNT ACQBULK PREEXIT",
}
_PIPE = {opcode: pipe for pipe, listed in _OPCODES.items() for opcode in listed.split()}

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([^\s,\"]+)", re.MULTILINE)
_LABEL = re.compile(r"^\s*([.$\w]+):\s*$")
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;?\s*$")
_INSTRUCTION = re.compile(r"(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)([\w.]*)\s*(.*)")
_TARGET = re.compile(r"`\(([^)]+)\)")
_WIDTH = re.compile(r"\.(32|64|128)\b")


@attrs.frozen
class Instruction:
    """One instruction.

    Attributes:
        address: Bytes from the start of the kernel.
        opcode: Without modifiers: "MUFU".
        modifiers: With their dots: ".EX2"; empty if there are none.
        guard: The predicate that it is executed under: "@!P0"; empty if there is none.
        operands: The rest of the line.
    """

    address: int
    opcode: str
    modifiers: str
    guard: str
    operands: str

    @property
    def name(self) -> str:
        return self.opcode + self.modifiers

    @property
    def pipe(self) -> str:
        if self.opcode in _PIPE:
            return _PIPE[self.opcode]
        return "uniform" if self.opcode.startswith("U") else "ALU"

    @property
    def targets(self) -> tuple[str, ...]:
        """Labels that it may go to."""
        listed = re.search(r"BRANCH_TARGETS ([^\"]+)", self.operands)
        if listed:
            return tuple(listed[1].strip().split(","))
        return tuple(_TARGET.findall(self.operands))

    @property
    def conditional(self) -> bool:
        """Whether a branch may fall through: it has a guard, or a predicate as an operand."""
        predicate = self.opcode == "BRA" and re.match(r"!?U?P\d|~?UR", self.operands)
        return bool(self.guard) or bool(predicate)

    @property
    def bytes(self) -> int:
        """What one thread moves, for loads and stores."""
        width = _WIDTH.search(self.modifiers)
        return int(width[1]) // 8 if width else 4


@attrs.frozen(eq=False)
class Code:
    """A kernel's machine code.

    Attributes:
        kernel: Its name.
        instructions: In the order of their addresses.
        labels: Label -> index of the instruction behind it.
    """

    kernel: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]


def read_sass(text: str) -> tuple[Code, ...]:
    """The kernels in what nvdisasm printed.

    Raises:
        ValueError: A line that looks like an instruction and is none.
    """
    sections = list(_SECTION.finditer(text))
    ends = [s.start() for s in sections[1:]] + [len(text)]
    return tuple(
        _read_section(section[1], text[section.end() : end])
        for section, end in zip(sections, ends, strict=True)
    )


def _read_section(kernel: str, text: str) -> Code:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _LINE.match(line):
            parts = _INSTRUCTION.fullmatch(found[2].strip("{} "))
            if parts is None:
                raise ValueError(f"no SASS instruction: {line.strip()!r}")
            guard, opcode, modifiers, operands = parts.groups(default="")
            instructions.append(
                Instruction(int(found[1], 16), opcode, modifiers, guard.strip(), operands)
            )
    return Code(kernel, tuple(instructions), labels)


def disassemble(cubin: bytes) -> tuple[Code, ...]:
    """The kernels of a cubin.

    Raises:
        fa4core.compile.tools.ToolMissing: nvdisasm is not installed; says how to get it.
    """
    return read_sass(run_on_cubin("nvdisasm", cubin, "--print-code"))


def by_pipe(instructions: Iterable[Instruction]) -> dict[str, int]:
    """How many instructions each pipe gets, in the order of `PIPES`."""
    counts = Counter(i.pipe for i in instructions)
    return {pipe: counts[pipe] for pipe in PIPES}
