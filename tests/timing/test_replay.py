"""The simulator on sequences written for it, where the cycles are known from the units' rates."""

from __future__ import annotations

import attrs
import pytest

from fa4core.compile.sass import read_sass
from fa4core.compile.sass_control import Control
from fa4core.emulator import native
from fa4core.emulator.trace import MMA_FLAGS, Kind
from fa4core.plan.target import SM90, SM100, Rates
from fa4core.timing.graph import Graph
from fa4core.timing.match import Step
from fa4core.timing.parameters import Parameters
from fa4core.timing.replay import REASONS, Program, replay

try:
    native.compiler()
except native.CompilerMissing:  # pragma: no cover
    pytest.skip("no C++ compiler", allow_module_level=True)

RATES = SM100.measured
EXACT = attrs.evolve(Parameters.of(RATES), jitter=0.0, warp_skew=0.0)
CODE = """
	.section	.text.k,"ax",@progbits
k:
        /*0000*/                   FFMA R1, R2, R3, R4 ;
        /*0010*/                   FFMA2 R2, R4.F32x2.HI_LO, R8.F32, R9.F32x2.HI_LO ;
        /*0020*/                   FMNMX R1, R2, R3, !PT ;
        /*0030*/                   MUFU.EX2 R4, R4 ;
        /*0040*/                   UTCHMMA gdesc[UR56], gdesc[UR4], tmem[UR7], tmem[UR24], UPT ;
        /*0050*/                   UTCBAR [UR4], URZ ;
        /*0060*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4+0x20], R7 ;
        /*0070*/                   SYNCS.EXCH.64 URZ, [UR46+0x140], UR4 ;
        /*0080*/                   LDTM.x32 R4, tmem[UR6] ;
        /*0090*/                   STS.128 [R1], R4 ;
        /*00a0*/                   SYNCS.ARRIVE.TRANS64 RZ, [UR4+0x20], R4 ;
        /*00b0*/                   UTMALDG.4D [UR16], [UR24], desc[URZ] ;
        /*00c0*/                   EXIT ;
        /*00d0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], R24 ;
        /*00e0*/                   HGMMA.64x128x16.F32.BF16 R88, R152, gdesc[UR4].tnspB, R88, gsb0 ;
        /*00f0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0100*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0110*/                   LDS.128 R4, [R1] ;
"""
NAMES = [
    "FFMA",
    "FFMA2",
    "FMNMX",
    "MUFU",
    "MMA",
    "COMMIT",
    "WAIT",
    "INIT",
    "LDTM",
    "STS",
    "ARRIVE",
    "LOAD",
    "EXIT",
    "WGMMA",
    "WGMMA, LAST",
    "ALL BUT ONE",
    "ALL",
    "LDS",
]
BARRIER = (0, 1024)
PLAIN = Control(stall=1, switch=False, write=7, read=7, wait=0, line=0)
#: WAIT takes scoreboard 0, EXIT waits for it.
CONTROL = {"WAIT": attrs.evolve(PLAIN, write=0), "EXIT": attrs.evolve(PLAIN, wait=1)}


def event(kind: Kind, *operands: int) -> tuple[int, ...]:
    return (0, 0, int(kind), *operands, *(0,) * (5 - len(operands)))


def step(name: str, *events: tuple[int, ...]) -> Step:
    return Step(NAMES.index(name), events)


BEGIN = [step("INIT", event(Kind.MBARRIER_INIT, *BARRIER, 1))]
WAIT = [step("WAIT", event(Kind.MBARRIER_WAIT, *BARRIER, 0, 1)), step("EXIT")]
END = [step("COMMIT", event(Kind.COMMIT, 1, BARRIER[1])), *WAIT]


def run(
    *warps: list[Step],
    parameters: Parameters = EXACT,
    seed: int = 0,
    rates: Rates = RATES,
    ctas: int = 1,
):
    (code,) = read_sass(CODE)
    graph = Graph(code, [CONTROL.get(name, PLAIN) for name in NAMES], "")
    program = Program(graph, tuple((0, n, steps) for n, steps in enumerate(warps)), ctas)
    parameters = attrs.evolve(parameters, mac=rates.mma / 2)
    return replay(program, rates, parameters, seed)


@pytest.mark.parametrize(("name", "clocks"), [("FFMA", 1), ("FFMA2", 2), ("FMNMX", 2), ("MUFU", 8)])
def test_a_pipe_takes_a_warp_every_so_many_clocks(name, clocks):
    found = run([step(name)] * 100)
    assert found.cycles == pytest.approx(100 * clocks, abs=clocks)


def test_warps_of_a_scheduler_share_its_pipes_and_others_do_not():
    alone = run([step("MUFU")] * 50).cycles
    assert run(*[[step("MUFU")] * 50] * 4).cycles == alone
    assert run(*[[step("MUFU")] * 50] * 8).cycles == pytest.approx(2 * alone, abs=8)


def products(*, in_tmem: bool) -> list[Step]:
    """A product of 128 x 128 x 128."""
    flags = MMA_FLAGS["a_elsewhere"] if in_tmem else 0
    return [step("MMA", event(Kind.MMA, 128, 128, 16, flags))] * 8


def test_the_papers_terms_of_a_tile():
    """FlashAttention-4, table 1, a 128 x 128 tile at head dim 128: 1024, 768 and 1024 cycles."""
    scores, output = products(in_tmem=False), products(in_tmem=True)
    found = run([*BEGIN, *scores, *output, *END], *[[step("MUFU")] * 128] * 4)
    assert found.units["tensor"] == 1024
    assert found.units["SMEM"] == 768
    assert found.units["MUFU"] == 1024


@pytest.mark.parametrize("rows", [256, 128])
def test_a_pair_multiplies_at_full_rate(rows):
    """Also with 64 rows in each CTA, whose columns then fill all lanes."""
    product = step("MMA", event(Kind.MMA, rows, 128, 16, MMA_FLAGS["pair"]))
    found = run([*BEGIN, *[product] * 8, *END], ctas=2)
    assert found.units["tensor"] == 8 * rows // 2 * 128 * 16 / 4096
    assert found.units["SMEM"] == 8 * (rows // 2 + 64) * 16 * 2 / 128


def test_a_commit_ends_a_wait_when_the_products_are_done():
    found = run([*BEGIN, *products(in_tmem=False), *END])
    # operands of the first product come in 64 cycles, each product takes 64
    assert 576 + EXACT.mma_latency <= found.cycles <= 576 + EXACT.mma_latency + 100
    (warp,) = found.warps
    assert warp["mbarriers"][0][:2] == list(BARRIER)
    assert warp["spent"][REASONS.index("mbarrier")] > 500


WGMMA = event(Kind.MMA, 64, 128, 16, MMA_FLAGS["warpgroup"])
FROM_REGISTERS = event(
    Kind.MMA, 64, 128, 16, MMA_FLAGS["warpgroup"] | MMA_FLAGS["a_elsewhere"]
)  # fmt: skip
GROUP = [*[step("WGMMA", WGMMA)] * 7, step("WGMMA, LAST", FROM_REGISTERS)]


def hopper(*warps: list[Step]):
    return run(*warps, rates=SM90.measured)


def test_a_warpgroup_multiplies_at_hoppers_rate():
    """64 x 128 x 16 take 64 cycles of 4096 FLOP, and 2 + 4 KiB of operands; A of the last is in
    registers. Four warps form one product."""
    found = hopper(*[[*GROUP, step("ALL"), step("EXIT")]] * 4)
    assert found.units["tensor"] == 8 * 64
    assert found.units["SMEM"] == 7 * 48 + 32
    latency = EXACT.mma_latency
    assert 8 * 64 + 48 + latency <= found.cycles <= 8 * 64 + 48 + latency + 20


def test_a_product_waits_for_the_warpgroups_last_warp():
    late = [*[step("MUFU")] * 100, *GROUP, step("ALL"), step("EXIT")]
    alone = hopper(*[[*GROUP, step("ALL"), step("EXIT")]] * 4).cycles
    assert hopper(*[[*GROUP, step("ALL"), step("EXIT")]] * 3, late).cycles == pytest.approx(
        alone + 800, abs=20
    )


def test_a_wait_for_all_groups_but_one_ends_earlier():
    def asked(wait: str) -> int:
        return hopper(*[[*GROUP, *GROUP, step(wait), step("EXIT")]] * 4).warps[0]["finished"]

    assert asked("ALL") - asked("ALL BUT ONE") == pytest.approx(8 * 64, abs=20)


@pytest.mark.parametrize(("conflicts", "clocks"), [(0.0, 1), (1.0, 2)])
def test_products_in_registers_slow_down_what_is_issued_beside_them(conflicts, clocks):
    """Not what is issued alone, and not beside products that accumulate in tensor memory."""
    parameters = attrs.evolve(EXACT, dispatch_conflict=conflicts)
    beside = [step("FFMA")] * 600

    def finished(*warps: list[Step], rates: Rates = RATES) -> int:
        return run(*warps, beside, parameters=parameters, rates=rates).warps[-1]["finished"]

    group = [*[step("WGMMA", WGMMA)] * 32, step("ALL"), step("EXIT")]  # 32 * 64 cycles
    assert finished(*[group] * 4, rates=SM90.measured) == pytest.approx(600 * clocks, abs=80)
    assert finished(rates=SM90.measured) == pytest.approx(600, abs=5)
    assert finished([*BEGIN, *products(in_tmem=False), *END]) == pytest.approx(600, abs=20)


def test_bulk_loads_and_products_share_shared_memory():
    """16 KiB take 128 passes, and their bytes complete the barrier."""
    found = run([
        *BEGIN,
        step("ARRIVE", event(Kind.MBARRIER_ARRIVE, *BARRIER, 1, 16384)),
        step("LOAD", event(Kind.BULK_LOAD, *BARRIER, 16384, 0)),
        *WAIT,
    ])  # fmt: skip
    assert found.units["SMEM"] == 128
    transfer = 16384 / EXACT.tma_bytes
    assert found.cycles >= EXACT.bulk_load_latency + transfer
    assert found.cycles <= EXACT.bulk_load_latency + transfer + 120


def test_bank_conflicts_cost_passes():
    smooth = run([step("STS", event(Kind.SHARED_WRITE, 0, 0, 512, 4))] * 100)
    rough = run([step("STS", event(Kind.SHARED_WRITE, 0, 0, 512, 32))] * 100)
    left = int(EXACT.lsu_queue)  # may still be in the queue at the end
    assert smooth.cycles <= 400 + 4
    assert rough.cycles >= 32 * (100 - left)


def test_what_all_lanes_read_leaves_the_banks_to_others():
    """One pass, and two clocks of the way back."""
    found = run([step("LDS", event(Kind.SHARED_READ, 0, 0, 512, 1, 2))] * 100)
    left = int(EXACT.lsu_queue)
    assert 100 - left <= found.units["SMEM"] <= 100
    assert found.cycles >= 2 * (100 - left)


def test_a_copy_between_ctas_is_read_and_written():
    copied = step("LOAD", event(Kind.BULK_LOAD, *BARRIER, 16384, 1, 1))
    meant = step("ARRIVE", event(Kind.MBARRIER_ARRIVE, *BARRIER, 1, 16384))
    found = run([*BEGIN, meant, copied, *WAIT], ctas=2)
    assert 2 * found.units["SMEM"] == 128 + 128  # the mean over two SMs


def test_who_waits_for_ever_is_named():
    with pytest.raises(RuntimeError, match=r"warp 0 .*the mbarrier at 1024 of CTA 0"):
        run([*BEGIN, *WAIT])


def test_a_seed_repeats_and_seeds_differ():
    steps = [s for _ in range(40) for s in (step("MUFU"), step("FFMA"), step("LDTM"))]
    parameters = Parameters.of(RATES)
    one, same, other = (run(*[steps] * 8, parameters=parameters, seed=n) for n in (1, 1, 2))
    assert one.warps == same.warps
    assert [w["finished"] for w in one.warps] != [w["finished"] for w in other.warps]
