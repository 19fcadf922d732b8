"""Named, readable rules that break a correct kernel by editing its PTX.

Every rule fails loudly when it finds nothing to change: a mutation that mutates nothing proves
nothing. Statements are addressed by how they begin and by their number in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import attrs

from fa4core.emulator.launch import Launch

Rule = Callable[[str], str]
_PREDICATE = r"(?:@!?%p\d+\s+)?"


def _positions(ptx: str, begins: str) -> list[re.Match[str]]:
    pattern = rf"^[ \t]*{_PREDICATE}{begins}[^;]*;"
    found = list(re.finditer(pattern, ptx, re.MULTILINE))
    if not found:
        raise AssertionError(f"no statement begins with {begins!r}")
    return found


def _chosen(found: list[re.Match[str]], number: int | None) -> list[re.Match[str]]:
    return found if number is None else [found[number]]


def drop(begins: str, number: int | None = None) -> Rule:
    """Remove statements that begin so (a regular expression); number: only that one."""

    def rule(ptx: str) -> str:
        for match in reversed(_chosen(_positions(ptx, begins), number)):
            ptx = ptx[: match.start()] + "// dropped" + ptx[match.end() :]
        return ptx

    return rule


def edit(begins: str, pattern: str, replacement: str, number: int | None = None) -> Rule:
    """Change text inside statements that begin so."""

    def rule(ptx: str) -> str:
        for match in reversed(_chosen(_positions(ptx, begins), number)):
            changed, count = re.subn(pattern, replacement, match.group(0), count=1)
            if not count:
                raise AssertionError(f"{pattern!r} is not in {match.group(0)!r}")
            ptx = ptx[: match.start()] + changed + ptx[match.end() :]
        return ptx

    return rule


def after_wait(number: int, statement: str) -> Rule:
    """Put a statement behind the end of one wait loop."""

    def rule(ptx: str) -> str:
        match = list(re.finditer(r"DONE:\s*\}", ptx))[number]
        return ptx[: match.end()] + f"\n\t{statement}" + ptx[match.end() :]

    return rule


def both(*rules: Rule) -> Rule:
    """One rule after the other."""

    def rule(ptx: str) -> str:
        for one in rules:
            ptx = one(ptx)
        return ptx

    return rule


def move(begins: str, number: int, target: str, target_number: int) -> Rule:
    """Move one statement in front of another one."""

    def rule(ptx: str) -> str:
        match = _positions(ptx, begins)[number]
        goal = _positions(ptx, target)[target_number]
        text = match.group(0)
        if goal.start() > match.start():
            raise AssertionError("moves go towards the beginning")
        cut = ptx[: match.start()] + ptx[match.end() :]
        return cut[: goal.start()] + text + "\n" + cut[goal.start() :]

    return rule


def skip_wait(number: int | None = None) -> Rule:
    """Waits for an mbarrier are gone: the code goes on at once, whatever the barrier's phase."""

    def rule(ptx: str) -> str:
        found = list(re.finditer(r"mbarrier\.try_wait[^;]*;", ptx))
        if not found:
            raise AssertionError("no wait loop")
        for match in reversed(_chosen(found, number)):
            ptx = ptx[: match.start()] + "setp.eq.u32 P1, 0, 0;" + ptx[match.end() :]
        return ptx

    return rule


def ignore_wait(number: int | None = None) -> Rule:
    """Waits for an mbarrier are tried once: try_wait may give up, and its answer is not looked at."""
    return edit(r"@P1 bra\.uni DONE", r"@P1 bra", "bra", number)


def flip_phase(number: int | None = None) -> Rule:
    """Waits for an mbarrier wait for the other phase (immediate or register operand)."""

    def rule(ptx: str) -> str:
        pattern = r"(mbarrier\.try_wait\.parity\.shared\.b64 P1, \[[^\]]+\], )(%r\d+|\d+)(, \d+;)"
        found = list(re.finditer(pattern, ptx))
        if not found:
            raise AssertionError("no wait")
        for match in reversed(_chosen(found, number)):
            operand = match.group(2)
            if operand.isdigit():
                new = match.group(1) + str(1 - int(operand)) + match.group(3)
            else:
                flip = f".reg .b32 FLIP; xor.b32 FLIP, {operand}, 1; "
                new = flip + match.group(1) + "FLIP" + match.group(3)
            ptx = ptx[: match.start()] + new + ptx[match.end() :]
        return ptx

    return rule


def constant(begins: str, old: int, new: int, number: int | None = None) -> Rule:
    """Change an immediate operand; number counts the statements that begin so and have it."""
    literal = rf"(?<![\w.%+]){old}(?!\w)"

    def rule(ptx: str) -> str:
        found = [m for m in _positions(ptx, begins) if re.search(literal, m.group(0))]
        if not found:
            raise AssertionError(f"no {begins!r} with {old}")
        for match in reversed(_chosen(found, number)):
            changed = re.sub(literal, str(new), match.group(0), count=1)
            ptx = ptx[: match.start()] + changed + ptx[match.end() :]
        return ptx

    return rule


def applied(rule: Rule, everywhere: bool = True) -> Callable[[Launch], Launch]:
    """A rule as a transformation of launches. everywhere: it must apply to each of them; otherwise
    a launch that it doesn't apply to stays the same object."""

    def change(launch: Launch) -> Launch:
        try:
            ptx = rule(launch.ptx)
        except AssertionError:
            if everywhere:
                raise
            return launch
        return attrs.evolve(launch, ptx=ptx)

    return change
