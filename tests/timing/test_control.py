"""Control codes of machine code, from words whose fields are known."""

from __future__ import annotations

import pytest

from fa4core.compile.sass_control import NO_SCOREBOARD, control_of


def word(stall: int, no_switch: int, write: int, read: int, wait: int, reuse: int = 0) -> int:
    """The second 64-bit word of an instruction."""
    bits = stall | no_switch << 4 | write << 5 | read << 8 | wait << 11 | reuse << 17
    return bits << 41 | 0x1234


@pytest.mark.parametrize("stall", [0, 1, 15])
@pytest.mark.parametrize("scoreboard", [0, 5, 7])
@pytest.mark.parametrize("wait", [0, 0b100001, 0b111111])
def test_fields(stall, scoreboard, wait):
    found = control_of(word(stall, 1, scoreboard, 7 - scoreboard, wait, reuse=15), line=9)
    assert (found.stall, found.switch, found.wait, found.line) == (stall, False, wait, 9)
    assert (found.write, found.read) == (scoreboard, 7 - scoreboard)


def test_an_instruction_of_a_compiled_kernel():
    """`UMOV UR9, 0x1` with what nvdisasm prints behind it."""
    found = control_of(0x000FE20000000000)
    assert (found.stall, found.write, found.read, found.wait) == (1, NO_SCOREBOARD, 7, 0)
