"""Traces of the core, on hand-written PTX: what was executed, and what the operations did."""

from __future__ import annotations

import numpy as np
import pytest
from core_ptx import ptx, run

from fa4core.emulator.trace import Kind, Trace, WarpTrace

STORE = "mul.wide.u32 %rd50, %r0, 4; add.s64 %rd50, %rd50, %rd0; st.global.b32 [%rd50], %r10;"
LOOP = "mov.u32 %r10, 0; again: add.u32 %r10, %r10, 1; setp.lt.u32 %p1, %r10, 5; @%p1 bra again;"


def traced(body: str, *arrays: np.ndarray, **options) -> Trace:
    found = run(body, *arrays, trace=True, **options).trace
    assert found is not None
    return found


def events(warp: WarpTrace, kind: Kind) -> list[list[int]]:
    """Operands a to e of the events of a kind."""
    return [row[3:] for row in warp.events.tolist() if row[2] == kind]


def test_without_asking_there_is_none():
    assert run(LOOP + STORE, np.zeros(32, np.uint32)).trace is None


def test_statements_in_the_order_of_their_execution():
    out = np.zeros(32, np.uint32)
    trace = traced(LOOP + STORE, out)
    (warp,) = trace.warps
    lines = ptx(LOOP + STORE, 1).splitlines()
    text = [lines[n - 1] for n in trace.lines[warp.statements()]]
    assert len(warp.statements()) == warp.runs[:, 1].sum() == 3 + 1 + 5 * 3 + 3 + 1
    assert all(text)
    counts = np.bincount(warp.statements())
    assert sorted(counts[counts > 1].tolist()) == [5, 5, 5]


@pytest.mark.parametrize("seed", range(4))
def test_events_do_not_depend_on_the_order_of_warps(seed):
    body = """setp.ne.u32 %p1, %r0, 0; @%p1 bra skip; mbarrier.init.shared.b64 [%r1], 2; skip:
    bar.sync 0; and.b32 %r3, %r0, 31; setp.ne.u32 %p2, %r3, 0;
    @%p2 bra arrived; mbarrier.arrive.shared.b64 _, [%r1]; arrived:
    { .reg .pred P; again: mbarrier.try_wait.parity.shared.b64 P, [%r1], 0, 1000;
    @P bra over; bra again; over: }
    mov.u32 %r10, 1;"""
    trace = traced(body + STORE, np.zeros(64, np.uint32), block=64, smem=64, seed=seed)
    for warp in trace.warps:
        assert events(warp, Kind.BARRIER_SYNC) == [[0, 0, 64, 0, 0]]
        assert events(warp, Kind.MBARRIER_ARRIVE) == [[0, 1024, 1, 0, 0]]
        assert events(warp, Kind.MBARRIER_WAIT)[-1] == [0, 1024, 0, 1, 0]  # the phase was complete
    inits = [events(w, Kind.MBARRIER_INIT) for w in sorted(trace.warps, key=lambda w: w.warp)]
    assert inits == [[[0, 1024, 2, 0, 0]], []]


@pytest.mark.parametrize(
    ("stride", "width", "passes"),
    [(4, 1, 1), (8, 1, 2), (128, 1, 32), (0, 1, 1), (16, 4, 4), (128, 4, 32), (144, 4, 4)],
)
def test_passes_through_the_banks_of_shared_memory(stride, width, passes):
    """Lanes `stride` bytes apart store `width` words each."""
    vector, registers = ("v4.", "{%r10, %r10, %r10, %r10}") if width == 4 else ("", "%r10")
    body = f"""mul.lo.u32 %r2, %r0, {stride}; add.u32 %r2, %r2, %r1; mov.u32 %r10, 7;
    st.shared.{vector}b32 [%r2], {registers};"""
    trace = traced(body + STORE, np.zeros(32, np.uint32), smem=32 * 144 + 16, detect="none")
    (found,) = events(trace.warps[0], Kind.SHARED_WRITE)
    assert found[2:4] == [128 * width, passes]


@pytest.mark.parametrize(
    ("address", "passes", "clocks"),
    [("%r0 * 16", 4, 4), ("%r0 / 2 * 16", 2, 2), ("%r0 / 4 * 16", 2, 2), ("%r0 / 32", 1, 2)],
)
def test_lanes_with_one_address_share_passes(address, passes, clocks):
    """Each loads four words. The data of one address come out of the banks at once, but pass the
    way to the registers twice."""
    _, *rest = address.split()
    steps = {"*": "mul.lo.u32", "/": "div.u32"}
    body = "mov.u32 %r2, %r0;" + "".join(
        f"{steps[operation]} %r2, %r2, {number};"
        for operation, number in zip(rest[::2], rest[1::2], strict=True)
    )
    body += "add.u32 %r2, %r2, %r1; ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r2];"
    trace = traced(body + STORE, np.zeros(32, np.uint32), smem=512, detect="none")
    (found,) = events(trace.warps[0], Kind.SHARED_READ)
    assert found[2:] == [512, passes, clocks]


def test_bulk_load_names_its_barrier_and_bytes():
    source = np.zeros(80, np.uint32)
    start = (-source.ctypes.data // 4) % 4
    body = """setp.ne.u32 %p1, %r0, 0; @%p1 bra done; mbarrier.init.shared.b64 [%r1], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 256; add.u32 %r2, %r1, 128;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 256, [%r1];
    done: mov.u32 %r10, 1;"""
    trace = traced(
        body + STORE, np.zeros(32, np.uint32), source[start : start + 64], smem=512, detect="none"
    )
    (warp,) = trace.warps
    assert events(warp, Kind.MBARRIER_ARRIVE) == [[0, 1024, 1, 256, 0]]
    assert events(warp, Kind.BULK_LOAD) == [[0, 1024, 256, 0, 0]]


def test_every_warp_of_every_cta_has_its_own():
    trace = traced(LOOP + STORE, np.zeros(64, np.uint32), grid=3, block=64)
    assert sorted((w.cta, w.warp) for w in trace.warps) == [
        (c, w) for c in range(3) for w in (0, 1)
    ]
    assert len({w.statements().tobytes() for w in trace.warps}) == 1
