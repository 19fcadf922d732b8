"""What machine code says about its own schedule: stall counts, scoreboards, and PTX lines.

From Volta on, bits 105 to 125 of a 128-bit instruction hold what the assembler decided: how many
cycles the warp waits before its next instruction, whether it may be overtaken, which of six
scoreboards it holds until its result is written or its operands are read, and which scoreboards it
waits for. Layout: Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking"
(arXiv 1804.06826), section 2.1. Code compiled with line information also carries its PTX text and
the line of each instruction in it.
"""

from __future__ import annotations

import re

import attrs

from fa4core.compile.sass import Code, read_sass
from fa4core.compile.tools import run_on_cubin

NO_SCOREBOARD = 7
_SHIFT = 41  # of the second 64-bit word: bit 105 of the instruction
_SECTION = re.compile(r"^\s*\.section\s+\.text\.", re.MULTILINE)
_LINE = re.compile(r'^\s*//## File "([^"]*)", line (\d+)')
_CODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/.*/\* 0x[0-9a-f]{16} \*/\s*$")
_HIGH = re.compile(r"^\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
_PTX = ".nv_debug_ptx_txt"


@attrs.frozen
class Control:
    """Decisions of the assembler about one instruction.

    Attributes:
        stall: Cycles until the warp may issue its next instruction.
        switch: Whether the scheduler is asked to go on with another warp.
        write: Scoreboard held until the result is there, or `NO_SCOREBOARD`.
        read: Scoreboard held until the operands are read, or `NO_SCOREBOARD`.
        wait: Mask of scoreboards that it waits for.
        line: Of the PTX that it was made from, from 1; 0 if that is not known.
    """

    stall: int
    switch: bool
    write: int
    read: int
    wait: int
    line: int


def control_of(high: int, line: int = 0) -> Control:
    """From the second 64-bit word of an instruction."""
    bits = high >> _SHIFT
    return Control(
        stall=bits & 15,
        switch=not bits >> 4 & 1,
        write=bits >> 5 & 7,
        read=bits >> 8 & 7,
        wait=bits >> 11 & 63,
        line=line,
    )


def disassemble_with_control(cubin: bytes) -> tuple[tuple[Code, tuple[Control, ...]], ...]:
    """The kernels of a cubin, each with the control of its instructions, in order.

    Raises:
        fa4core.compile.tools.ToolMissing: nvdisasm is not installed; says how to get it.
        ValueError: What it printed is not understood.
    """
    text = run_on_cubin("nvdisasm", cubin, "--print-code", "-hex", "-gp")
    starts = [m.start() for m in _SECTION.finditer(text)]
    found = []
    for begin, end in zip(starts, [*starts[1:], len(text)], strict=True):
        section = text[begin:end]
        (code,) = read_sass(re.sub(r"/\* 0x[0-9a-f]{16} \*/", "", section))
        control = _control(section)
        if len(control) != len(code.instructions):
            raise ValueError(
                f"{code.kernel}: {len(code.instructions)} instructions, {len(control)} encodings"
            )
        found.append((code, control))
    return tuple(found)


def _control(section: str) -> tuple[Control, ...]:
    line, expected = 0, False
    found: list[Control] = []
    for text in section.splitlines():
        if place := _LINE.match(text):
            line = int(place[2]) if place[1] == _PTX else 0
        elif _CODE.match(text):
            expected = True
        elif expected and (high := _HIGH.match(text)):
            found.append(control_of(int(high[1], 16), line))
            expected = False
    return tuple(found)
