"""The reader of machine code on a small kernel written for it, where every answer is known."""

from __future__ import annotations

import pytest

from fa4core.compile.flow import flow_of, is_arrival, is_wait
from fa4core.compile.sass import Code, by_pipe, read_sass

# A softmax-like loop: wait (retried out of line), load, mask or not, an inner loop of two
# instructions, store, arrive. Masking costs 4 instructions, not masking 1.
LOOP = """
	.section	.text.kernel_small,"ax",@progbits
kernel_small:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
.L_head:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x20], R7 ;
        /*0020*/              @!P0 BRA `(.L_retry) ;
.L_there:
        /*0030*/                   LDTM.x32 R4, tmem[UR6] ;
        /*0040*/                   BRA.U !UP0, `(.L_masked) ;
        /*0050*/                   BRA `(.L_inner) ;
.L_masked:
        /*0060*/                   ISETP.GE.AND P1, PT, R3, R2, PT ;
        /*0070*/                   FSEL R4, R4, -INF , P1 ;
        /*0080*/                   FMNMX3 R8, R4, R5, R6, !PT ;
        /*0090*/                   FSEL R5, R5, -INF , P1 ;
.L_inner:
        /*00a0*/                   FFMA2 R4, R4.F32x2.HI_LO, R8.F32, R9.F32x2.HI_LO ;
        /*00b0*/              @P2  BRA `(.L_inner) ;
        /*00c0*/                   MUFU.EX2 R4, R4 ;
        /*00d0*/                   STTM.x16 tmem[UR5], R4 ;
        /*00e0*/               @P3 SYNCS.ARRIVE.TRANS64.ART0 RZ, [UR4+0x60], RZ ;
        /*00f0*/              @P4  BRA `(.L_head) ;
        /*0100*/                   EXIT ;
.L_retry:
        /*0110*/                   MOV R2, UR4 ;
.L_again:
        /*0120*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2+URZ+0x20], R7 ;
        /*0130*/              @!P0 NANOSLEEP.SYNCS 0x989680 ;
        /*0140*/              @!P0 BRA `(.L_again) ;
        /*0150*/                   BRA `(.L_there) ;
"""


@pytest.fixture(scope="module")
def code() -> Code:
    (found,) = read_sass(LOOP)
    return found


def test_instructions_are_read(code: Code) -> None:
    assert code.kernel == "kernel_small"
    assert len(code.instructions) == 22
    wait, retry = code.instructions[1:3]
    assert wait.name == "SYNCS.PHASECHK.TRANS64.TRYWAIT" and is_wait(wait)
    assert (retry.guard, retry.targets, retry.conditional) == ("@!P0", (".L_retry",), True)
    unconditional = next(i for i in code.instructions if i.address == 0x50)
    assert not unconditional.conditional
    assert next(i for i in code.instructions if i.address == 0x40).conditional


def test_every_instruction_has_a_pipe(code: Code) -> None:
    pipes = by_pipe(code.instructions)
    assert sum(pipes.values()) == len(code.instructions)
    assert pipes["FMA x2"] == 1 and pipes["MUFU"] == 1 and pipes["TMEM"] == 2
    assert pipes["ALU"] == 5  # four of the mask, and MOV
    assert pipes["barrier"] == 4 and pipes["control"] == 8 and pipes["LSU"] == 1


def test_loops_nest(code: Code) -> None:
    flow = flow_of(code)
    heads = {flow.blocks[loop.head][0].address for loop in flow.loops}
    assert heads == {0x10, 0xA0, 0x120}
    (outer,) = flow.innermost(lambda loop: any(map(is_arrival, loop.instructions)))
    assert {flow.blocks[child.head][0].address for child in outer.children} == {0xA0, 0x120}
    retries = [child for child in outer.children if child.is_retry]
    assert [flow.blocks[loop.head][0].address for loop in retries] == [0x120]


@pytest.mark.parametrize("trips", [1, 8])
def test_ways_do_every_step_and_retry_nothing(code: Code, trips: int) -> None:
    flow = flow_of(code)
    outer = next(loop for loop in flow.loops if flow.blocks[loop.head][0].address == 0x10)
    short, long = (outer.way(longest, lambda _: trips) for longest in (False, True))
    for way in (short, long):
        assert sum(map(is_wait, way.all)) == 1
        assert sum(map(is_arrival, way.all)) == 1
        assert len(way.nested) == 2 * trips
    assert len(long.all) - len(short.all) == 3
    assert by_pipe(long.all)["ALU"] == 4 and by_pipe(short.all)["ALU"] == 0


def test_steps_of_some_iterations_can_be_left_out(code: Code) -> None:
    """Here: an arrival that a branch may jump over."""
    text = LOOP.replace(
        "        /*00d0*/  ",
        "        /*00c8*/              @P5 BRA `(.L_skip) ;\n        /*00d0*/  ",
    ).replace("        /*00f0*/  ", ".L_skip:\n        /*00f0*/  ")
    (changed,) = read_sass(text)
    flow = flow_of(changed)
    outer = next(loop for loop in flow.loops if flow.blocks[loop.head][0].address == 0x10)
    for fewest, count in ((False, 1), (True, 0)):
        way = outer.way(False, fewest_steps=fewest)
        assert sum(map(is_arrival, way.all)) == count


def test_what_is_no_instruction_is_an_error() -> None:
    with pytest.raises(ValueError, match="no SASS"):
        read_sass(LOOP.replace("MUFU.EX2 R4, R4", "%%%"))


def test_switches_go_to_all_their_targets() -> None:
    switch = """
	.section	.text.k,"ax",@progbits
        /*0000*/                   BRX R4 -0x960 (*"BRANCH_TARGETS .L_a,.L_b"*) ;
        /*0010*/                   NOP ;
.L_a:
        /*0020*/                   EXIT ;
.L_b:
        /*0030*/                   EXIT ;
"""
    (code,) = read_sass(switch)
    assert code.instructions[0].targets == (".L_a", ".L_b")
    assert sorted(flow_of(code).graph.edges) == [(0, 2), (0, 3)]
