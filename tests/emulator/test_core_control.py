"""Control flow, lanes and the parser of the core, on hand-written PTX."""

from __future__ import annotations

import numpy as np
from core_ptx import findings, kinds, run

STORE = """mul.wide.u32 %rd50, %r0, 4; add.s64 %rd50, %rd50, %rd0; st.global.b32 [%rd50], %r10;"""


def result(body: str, n: int = 32, **options) -> list[int]:
    out = np.zeros(n, np.uint32)
    run(body + STORE, out, block=n, **options)
    return out.tolist()


def test_lanes_loop_different_numbers_of_times():
    body = """mov.b32 %r10, 0; mov.b32 %r20, %r0;
    top: setp.eq.u32 %p1, %r20, 0; @%p1 bra done;
    add.u32 %r10, %r10, %r20; sub.u32 %r20, %r20, 1; bra top;
    done:"""
    for seed in range(4):
        assert result(body, seed=seed) == [t * (t + 1) // 2 for t in range(32)]


def test_lanes_meet_again_behind_a_branch():
    body = """mov.b32 %r10, 5; and.b32 %r20, %r0, 1; setp.eq.u32 %p1, %r20, 1; @%p1 bra odd;
    mov.b32 %r10, 7; bra join;
    odd: mov.b32 %r10, 9;
    join: shfl.sync.bfly.b32 %r10, %r10, 1, 31, -1;"""
    assert result(body) == [9, 7] * 16


def test_scopes_may_repeat_labels_and_names():
    block = """{ .reg .pred P1; .reg .b32 x; mov.b32 x, %r10; setp.gt.u32 P1, x, 40;
    @P1 bra DONE; add.u32 %r10, x, 1; DONE: }"""
    assert result("mov.b32 %r10, 39;" + block * 5) == [41] * 32


def test_elect_vote_and_guard():
    body = """mov.b32 %r10, 0; elect.sync %r20|%p1, -1; @%p1 mov.b32 %r10, 1;
    setp.lt.u32 %p2, %r0, 5; vote.sync.ballot.b32 %r21, %p2, -1; @!%p1 mov.b32 %r10, %r21;"""
    assert result(body) == [1] + [31] * 31


def test_shuffles_and_reductions():
    assert result("shfl.sync.up.b32 %r10, %r0, 3, 0, -1;") == [0, 1, 2, *range(29)]
    assert result("shfl.sync.down.b32 %r10, %r0, 1, 0x181f, -1;")[:9] == [1, 2, 3, 4, 5, 6, 7, 7, 9]
    assert result("redux.sync.add.s32 %r10, %r0, -1;") == [496] * 32
    assert result("match.any.sync.b32 %r10, 3, -1;") == [2**32 - 1] * 32


def test_exited_lanes_are_not_waited_for():
    body = """setp.gt.u32 %p1, %r0, 15; mov.b32 %r10, 1; @%p1 exit;
    activemask.b32 %r10; bar.warp.sync -1;"""
    assert result(body) == [0xFFFF] * 16 + [0] * 16


def test_an_unknown_instruction_names_its_line():
    report = findings("frobnicate.sync.b32 %r10, %r11;", np.zeros(1))[0]
    assert report.kind == "instruction"
    assert "frobnicate.sync.b32" in report.message
    assert "frobnicate" in report.ptx


def test_an_unknown_instruction_that_is_not_reached_is_no_error():
    body = """setp.ne.u32 %p1, %r0, %r0; mov.b32 %r10, 3; @!%p1 bra over;
    frobnicate.b32 %r10; over:"""
    assert result(body) == [3] * 32


def test_statistics_count_warps_and_bytes():
    out = np.zeros(64, np.uint32)
    statistics = run("mov.b32 %r10, 1;" + STORE, out, block=64)
    assert statistics.instructions["st.global.b32"] == 2
    assert statistics.by_warp[1]["st.global.b32"] == 1
    assert statistics.bytes["global.write"] == 256


def test_timeline_has_runs_and_waits():
    out = np.zeros(64, np.uint32)
    body = "mov.b32 %r10, 1; bar.sync 0;" + STORE
    events = run(body, out, block=64, timeline=True).timeline
    assert {event.kind for event in events} >= {"run", "wait"}
    assert {event.lane for event in events} == {"warp 0", "warp 1"}
    assert all(event.start < event.stop for event in events)


def test_bounds_and_alignment():
    out = np.zeros(32, np.uint32)
    assert kinds("mov.b32 %r10, 1; add.u32 %r0, %r0, 1;" + STORE, out) == {"bounds"}
    assert kinds("st.global.b32 [%rd0+2], %r0;", np.zeros(2, np.uint32)) == {"bounds"}
    assert kinds("st.shared.b32 [%r1+64], %r0;", out, smem=64) == {"bounds"}
    assert kinds("ld.shared.b32 %r10, [%r1];" + STORE, out, smem=64) == {"uninitialised"}


def test_unwritten_global_memory():
    a, b = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    load = "mul.wide.u32 %rd51, %r0, 4; add.s64 %rd51, %rd51, %rd1; ld.global.b32 %r10, [%rd51];"
    assert kinds(load + STORE, a, b, fresh=(1,)) == {"uninitialised"}
    assert kinds(load + STORE, a, b) == set()


def test_printf(capfd):
    body = """setp.gt.u32 %p1, %r0, 1; @%p1 bra end; cvt.rn.f64.u32 %rd20, %r0;
    { .param .b64 param0; .param .b64 param1; .param .b32 retval0; .local .align 8 .b8 depot[16];
    .reg .b64 p; mov.b64 p, depot; st.local.b32 [p], %r0; st.local.b64 [p+8], %rd20;
    cvta.local.u64 p, p;
    st.param.b64 [param0], %rd0; st.param.b64 [param1], p;
    call.uni (retval0), vprintf, (param0, param1); } end:"""
    run(body, np.frombuffer(bytearray(b"thread %d, %.1f%%\n\0"), np.uint8))
    assert capfd.readouterr().out == "thread 0, 0.0%\nthread 1, 1.0%\n"
