"""Ways through machine code, found for kernels that have nothing to do with attention."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

sys.path.insert(0, str(Path(__file__).parents[1] / "emulator"))

import attrs
import numpy as np
from cutlass import cute
from kernels.case import compiled, view
from suite import BY_NAME

from fa4core.compile.sass import read_sass
from fa4core.compile.sass_control import Control, disassemble_with_control
from fa4core.compile.tools import ToolMissing, find_tool
from fa4core.emulator.host import modules
from fa4core.emulator.session import emulator
from fa4core.emulator.trace import Kind, WarpTrace
from fa4core.plan.target import SM100
from fa4core.timing.graph import Graph, NoMatch
from fa4core.timing.match import match
from fa4core.timing.parameters import Parameters
from fa4core.timing.replay import Program, program_of, replay

try:
    find_tool("nvdisasm")
except ToolMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

NAMES = [
    "gemm bf16", "gemm bf16 two tiles", "gemm pair m256", "gemm pair split k", "wgmma bf16",
    "wgmma a from registers",
]  # fmt: skip


def emulated(name: str, seed: int):
    """Trace and machine code of a case, and CTAs of a cluster."""
    case = BY_NAME[name]
    function = compiled(case)
    with emulator(case.target, seed=seed, detect="none", record=False, trace=True) as session:
        function(*map(view, (*case.inputs(), *case.outputs())))
    launch, trace = session.launches[-1], session.statistics[-1].trace
    (code,) = [
        found
        for found in disassemble_with_control(modules.cubin_of(launch.ptx))
        if found[0].kernel == launch.kernel
    ]
    return trace, Graph(*code, launch.ptx), launch.cluster[0]


COMPARE = """
import sys
sys.path[:0] = {paths!r}
from test_match import instructions
name = "gemm bf16 two tiles"
without, lines = instructions(name, line_info=False)
assert not any(lines)
found, lines = instructions(name, line_info=True)
assert any(lines) and found == without and len(found) > 100
"""


def instructions(name: str, line_info: bool) -> tuple[list[tuple], list[int]]:
    """Machine code of a case with the assembler's decisions, and its PTX lines."""
    case = BY_NAME[name]
    with emulator("sm100", record=False, line_info=line_info):
        tensors = (*case.inputs(), *case.outputs())
        made = cute.compile(case.function, *map(view, tensors), *case.constants)
    ((code, control),) = disassemble_with_control(bytes(made.__cubin__))
    found = [
        (i.address, i.guard, i.name, attrs.evolve(c, line=0))
        for i, c in zip(code.instructions, control, strict=True)
    ]
    return found, [c.line for c in control]


def test_line_information_leaves_the_machine_code_as_it_is():
    """In a process of its own: the DSL does not stop to emit it once it has begun."""
    folder = Path(__file__).parent
    code = COMPARE.format(paths=[str(folder), str(folder.parent / "emulator")])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def indices(program: Program) -> list[list[int]]:
    return [[s.index for s in steps] for _, _, steps in program.warps]


@pytest.mark.parametrize("name", NAMES)
def test_every_operation_is_found_in_the_machine_code(name):
    trace, graph, ctas = emulated(name, seed=3)
    program = program_of(graph, trace, 0, ctas)
    for (cta, warp, steps), traced in zip(
        program.warps, sorted(trace.warps, key=lambda w: (w.cta, w.warp)), strict=False
    ):
        assert (traced.cta, traced.warp) == (cta, warp)
        events = [e for s in steps for e in s.events]
        wanted = [e for e in traced.events.tolist() if e[2] in (Kind.MMA, Kind.COMMIT)]
        assert [list(e) for e in events if e[2] in (Kind.MMA, Kind.COMMIT)] == wanted
        for kind in (Kind.BULK_LOAD, Kind.TMEM_LOAD, Kind.MBARRIER_ARRIVE, Kind.BARRIER_SYNC):
            assert sum(e[2] == kind for e in events) == (traced.events[:, 2] == kind).sum(), kind
        code = graph.code.instructions
        assert code[steps[0].index].address == 0 and code[steps[-1].index].opcode == "EXIT"


@pytest.mark.parametrize("name", NAMES)
def test_the_way_does_not_depend_on_the_emulators_order(name):
    ways = []
    for seed in (1, 2, 5):
        trace, graph, ctas = emulated(name, seed)
        ways.append(indices(program_of(graph, trace, 0, ctas)))
    assert ways[0] == ways[1] == ways[2]


def test_a_replay_does_the_products_of_the_trace():
    trace, graph, ctas = emulated("gemm bf16", seed=1)
    found = replay(program_of(graph, trace, 0, ctas), SM100.measured, Parameters.of(SM100.measured))
    m, n, k = 128, 64, 320
    assert found.units["tensor"] == m * n * k / 4096
    assert found.cycles > found.units["tensor"]


LOOP = """
	.section	.text.k,"ax",@progbits
k:
        /*0000*/                   MOV R1, R2 ;
.L_1:
        /*0010*/                   IADD3 R1, R1, R2, RZ ;
        /*0020*/               @P0 BRA `(.L_1) ;
        /*0030*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("runs", "way"), [([[0, 4]], [0, 1, 2, 3]), ([[0, 3], [1, 3]], [0, 1, 2, 1, 2, 3])]
)
def test_a_loop_without_barriers_is_passed_as_often_as_it_was(runs, way):
    (code,) = read_sass(LOOP)
    control = [Control(1, False, 7, 7, 0, line) for line in (1, 2, 3, 4)]
    warp = WarpTrace(0, 0, np.array(runs, np.int32), np.zeros((0, 8), np.int32))
    found = match(Graph(code, control, "\n" * 4), warp, np.array([1, 2, 3, 4]))
    assert [step.index for step in found] == way


def test_of_very_many_ways_those_that_were_executed_are_looked_at():
    """Thirteen branches one behind the other: 8,192 ways."""
    count, lines = 13, ['\t.section\t.text.k,"ax",@progbits', "k:"]
    for n in range(count):
        lines += [
            f"        /*{32 * n:04x}*/               @P0 BRA `(.L_{n}) ;",
            f"        /*{32 * n + 16:04x}*/                   MOV R1, R2 ;",
            f".L_{n}:",
        ]
    lines.append(f"        /*{32 * count:04x}*/                   EXIT ;")
    (code,) = read_sass("\n".join(lines) + "\n")
    control = [Control(1, False, 7, 7, 0, n + 1) for n in range(2 * count + 1)]
    taken = [n for n in range(2 * count + 1) if n % 4 != 1]  # every other branch was taken
    runs = np.array([[n, 1] for n in taken], np.int32)
    warp = WarpTrace(0, 0, runs, np.zeros((0, 8), np.int32))
    statements = np.arange(1, 2 * count + 2)
    found = match(Graph(code, control, "\n" * 40), warp, statements)
    assert [step.index for step in found] == taken


ONE_LOAD = """
	.section	.text.k,"ax",@progbits
k:
        /*0000*/                   MOV R1, R2 ;
        /*0010*/                   LDTM.x16 R4, tmem[UR4] ;
        /*0020*/                   EXIT ;
"""


def test_loads_that_the_assembler_left_out_are_not_looked_for():
    """Of two loads of tensor memory in the PTX, the first one's result is not used."""
    (code,) = read_sass(ONE_LOAD)
    control = [Control(1, False, 7, 7, 0, line) for line in (1, 3, 4)]
    events = [[n, n, Kind.TMEM_LOAD, 32, 16, 0, 0, 0] for n in (1, 2)]
    runs, lines = np.array([[0, 4]], np.int32), np.array([1, 2, 3, 4])
    graph = Graph(code, control, "\n" * 4)
    found = match(graph, WarpTrace(0, 0, runs, np.array(events, np.int32)), lines)
    assert [step.index for step in found] == [0, 1, 2]
    assert [event[1] for event in found[1].events] == [2]
    events[0][2] = Kind.TMEM_STORE
    with pytest.raises(NoMatch, match="TMEM_STORE of PTX line 2"):
        match(graph, WarpTrace(0, 0, runs, np.array(events, np.int32)), lines)


def test_a_trace_of_another_kernel_does_not_match():
    trace, _, _ = emulated("gemm bf16", seed=1)
    _, graph, _ = emulated("gemm bf16 two tiles", seed=1)
    with pytest.raises(NoMatch):
        for warp in trace.warps:
            match(graph, warp, trace.lines)
