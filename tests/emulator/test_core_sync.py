"""Barriers, asynchronous copies, ordering and the detectors of the core, on hand-written PTX.

Every bug has its correct twin beside it: a detector that fires too easily fails here as well.
"""

from __future__ import annotations

import numpy as np
import pytest
from core_ptx import findings, kinds, run

SEEDS = range(8)
ADDRESS = "mul.wide.u32 %rd50, %r0, 4; add.s64 %rd50, %rd50, %rd0;"
INIT = """setp.ne.u32 %p1, %r0, 0; @%p1 bra skip; mbarrier.init.shared.b64 [%r1], {count}; skip:
fence.mbarrier_init.release.cluster; bar.sync 0; add.u32 %r2, %r1, 128;"""
WAIT = """{{ .reg .pred P; again: mbarrier.try_wait.parity.shared.b64 P, [%r1], {phase}, 1000;
@P bra over; bra again; over: }}"""
BULK = """setp.ne.u32 %p2, %r0, 0; @%p2 bra issued;
mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 256;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 256, [%r1];
issued:"""
READ = "shl.b32 %r20, %r0, 2; add.u32 %r21, %r20, %r2; ld.shared.b32 %r10, [%r21];"
STORE = "st.global.b32 [%rd50], %r10;"


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """An output and an input of 64 words, the input aligned to 16 bytes."""
    raw = np.zeros(80, np.uint32)
    start = (-raw.ctypes.data // 4) % 4
    source = raw[start : start + 64]
    source[:] = np.arange(64) * 3 + 1
    return np.zeros(64, np.uint32), source


def test_bulk_load_through_an_mbarrier():
    body = ADDRESS + INIT.format(count=1) + BULK + WAIT.format(phase=0) + READ + STORE
    for seed in SEEDS:
        out, source = arrays()
        run(body, out, source, block=64, smem=1024, seed=seed)
        assert np.array_equal(out, source)


def test_bulk_load_without_its_wait():
    for seed in SEEDS:
        body = ADDRESS + INIT.format(count=1) + BULK + READ + STORE
        assert kinds(body, *arrays(), block=64, smem=1024, seed=seed) & {"race", "uninitialised"}


def test_a_wait_whose_answer_is_not_looked_at_orders_nothing():
    peek = "mbarrier.try_wait.parity.shared.b64 %p9, [%r1], 0, 1000;"
    for seed in SEEDS:
        body = ADDRESS + INIT.format(count=1) + BULK + peek + READ + STORE
        assert kinds(body, *arrays(), block=64, smem=1024, seed=seed) & {"race", "uninitialised"}


def test_deadlock_says_who_waits_for_what():
    body = INIT.format(count=2) + BULK + WAIT.format(phase=0)
    report = findings(body, *arrays(), block=64, smem=1024)[0]
    assert report.kind == "deadlock"
    assert "phase 0" in report.message
    assert "1 of 2 arrivals and 0 bytes are missing" in report.message
    assert "warp 1 waits" in report.message


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("mbarrier.arrive.shared.b64 _, [%r1];", "more arrival"),
        ("mbarrier.arrive.shared.b64 _, [%r1+8];", "no mbarrier was initialised"),
        ("mbarrier.expect_tx.shared.b64 [%r1], 1048575;", "2^20"),
    ],
    ids=["one too many", "wrong address", "too many bytes"],
)  # fmt: skip
def test_barrier_misuse(code: str, word: str):
    reports = findings(INIT.format(count=1) + code * 2, np.zeros(1), smem=1024)
    assert reports[0].kind == "barrier"
    assert word in reports[0].message


def test_initialising_a_used_mbarrier_again():
    again = "bar.sync 0; @%p1 bra o; mbarrier.init.shared.b64 [%r1], 2; o:"
    inval = "bar.sync 0; @%p1 bra q; mbarrier.inval.shared.b64 [%r1]; q:"
    body = INIT.format(count=1)
    assert kinds(body + again, np.zeros(1), smem=1024) == {"barrier"}
    assert kinds(body + inval + again, np.zeros(1), smem=1024) == set()


def test_named_barrier_orders_shared_memory():
    write = "shl.b32 %r20, %r0, 2; add.u32 %r21, %r20, %r1; st.shared.b32 [%r21], %r0;"
    read = "xor.b32 %r20, %r20, 128; add.u32 %r21, %r20, %r1; ld.shared.b32 %r10, [%r21];"
    for seed in SEEDS:
        out = np.zeros(64, np.uint32)
        run(ADDRESS + write + "bar.sync 0;" + read + STORE, out, block=64, smem=256, seed=seed)
        assert out.tolist() == [*range(32, 64), *range(32)]
        found = kinds(ADDRESS + write + read + STORE, out, block=64, smem=256, seed=seed)
        assert found & {"race", "uninitialised"}


def test_partial_barriers_pair_arrive_with_sync():
    write = "st.shared.b32 [%r1], 42; bar.arrive 1, 64; bra end;"
    read = "other: bar.sync 1, 64; ld.shared.b32 %r10, [%r1];" + STORE + "end:"
    body = ADDRESS + "setp.gt.u32 %p1, %r0, 31; @%p1 bra other;" + write + read
    for seed in SEEDS:
        out = np.zeros(64, np.uint32)
        run(body, out, block=64, smem=256, seed=seed)
        assert out.tolist() == [0] * 32 + [42] * 32
    wrong = body.replace("bar.arrive 1, 64", "bar.arrive 1, 96")
    assert "barrier" in kinds(wrong, np.zeros(64, np.uint32), block=64, smem=256)


STAGE = "shl.b32 %r20, %r0, 2; add.u32 %r21, %r20, %r1; st.shared.b32 [%r21], %r0;"
BULK_STORE = """setp.ne.u32 %p2, %r0, 0; @%p2 bra end;
cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 256;
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; end:"""


@pytest.mark.parametrize("fence", ["before the barrier", "behind it", "none"])
def test_bulk_store_needs_a_proxy_fence(fence: str):
    proxy = "fence.proxy.async.shared::cta;"
    order = {"before the barrier": proxy + "bar.sync 0;", "behind it": "bar.sync 0;" + proxy}
    body = STAGE + order.get(fence, "bar.sync 0;") + BULK_STORE
    for seed in SEEDS:
        _, target = arrays()
        reports = findings(body, np.zeros(1), target, block=64, smem=256, seed=seed)
        if fence == "none":
            assert reports[0].kind == "race"
            assert "fence.proxy.async" in reports[0].message
        else:
            assert reports == []
            assert target.tolist() == list(range(64))


def test_a_buffer_may_not_be_overwritten_before_its_store_has_read_it():
    more = "@!%p2 st.shared.b32 [%r1], 5;"
    body = STAGE + "fence.proxy.async.shared::cta; bar.sync 0;" + BULK_STORE
    unwaited = body.replace("cp.async.bulk.wait_group 0;", more)
    waited = body.replace("cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;" + more)
    for seed in SEEDS:
        _, target = arrays()
        assert kinds(unwaited, np.zeros(1), target, block=64, smem=256, seed=seed) == {"race"}
        assert kinds(waited, np.zeros(1), target, block=64, smem=256, seed=seed) == set()


CP_ASYNC = """shl.b32 %r20, %r0, 4; add.u32 %r21, %r20, %r1; cvt.u64.u32 %rd20, %r20;
add.s64 %rd21, %rd1, %rd20; cp.async.cg.shared.global [%r21], [%rd21], 16; cp.async.commit_group;"""
TO_BULK = """setp.ne.u32 %p2, %r0, 0; @%p2 bra end;
cp.async.bulk.global.shared::cta.bulk_group [%rd2], [%r1], 256;
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; end:"""


def test_cp_async_needs_its_wait_and_its_fence():
    wait, fence = "cp.async.wait_group 0;", "fence.proxy.async.shared::cta;"
    variants = {
        wait + fence + "bar.sync 0;": set(),
        wait + "bar.sync 0;": {"race"},  # the async proxy does not see it
        fence + "bar.sync 0;": {"race", "uninitialised"},
    }
    for middle, expected in variants.items():
        for seed in SEEDS:
            _, source = arrays()
            _, target = arrays()
            half = "setp.gt.u32 %p5, %r0, 15; @%p5 bra join;" + CP_ASYNC + "join:"
            body = half + middle + TO_BULK
            found = kinds(body, np.zeros(1), source, target, block=32, smem=256, seed=seed)
            assert found <= expected, middle
            assert bool(found) == bool(expected), middle
            if not expected:
                assert np.array_equal(source, target)


TURN = """mov.u32 %r5, %ctaid.x; setp.ne.u32 %p1, %r0, 0; @%p1 bra go;
spin: ld.{load}.gpu.global.b32 %r6, [%rd1]; setp.ne.u32 %p2, %r6, %r5; @%p2 bra spin;
go: bar.sync 0; ld.global.b32 %r10, [%rd50]; mul.lo.u32 %r10, %r10, 3; add.u32 %r10, %r10, %r5;
st.global.b32 [%rd50], %r10; bar.sync 0; @%p1 bra end;
{release} end:"""


@pytest.mark.parametrize(
    ("load", "release", "races"),
    [
        ("acquire", "red.release.gpu.global.add.u32 [%rd1], 1;", False),
        ("acquire", "fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%rd1], 1;", False),
        ("acquire", "red.relaxed.gpu.global.add.u32 [%rd1], 1;", True),
        ("relaxed", "red.release.gpu.global.add.u32 [%rd1], 1;", True),
    ],
)
def test_turns_through_global_memory(load: str, release: str, races: bool):
    body = ADDRESS + TURN.format(load=load, release=release)
    for seed in SEEDS:
        out, turn = np.ones(64, np.uint32), np.zeros(1, np.uint32)
        reports = findings(body, out, turn, grid=5, block=64, seed=seed)
        assert {r.kind for r in reports} == ({"race"} if races else set())
        if not races:
            value = 1
            for i in range(5):
                value = value * 3 + i
            assert (out == value).all()


def test_two_ctas_write_one_place():
    body = ADDRESS + "mov.u32 %r10, %ctaid.x; add.u32 %r10, %r10, {plus}; {op}"
    store, atom = "st.global.b32 [%rd50], %r10;", "red.global.add.u32 [%rd50], %r10;"
    out = np.zeros(32, np.uint32)
    assert kinds(body.format(plus=1, op=store), out, grid=2) == {"race"}
    assert kinds(body.format(plus=1, op=atom), out, grid=2) == set()
    same = ADDRESS + "mov.b32 %r10, 7;" + store  # nobody can tell the order
    assert kinds(same, out, grid=2) == set()


def test_cluster_barrier_and_remote_memory():
    body = (
        ADDRESS
        + """mov.u32 %r5, %cluster_ctarank; add.u32 %r10, %r5, 10;
    st.shared.b32 [%r1], %r10; {first} xor.b32 %r6, %r5, 1; mapa.shared::cluster.u32 %r7, %r1, %r6;
    ld.shared::cluster.b32 %r10, [%r7]; {last}
    setp.eq.u32 %p3, %r5, 0; @%p3 bra end; st.global.b32 [%rd50], %r10; end:"""
    )
    sync = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
    for seed in SEEDS:
        out = np.zeros(32, np.uint32)
        run(body.format(first=sync, last=sync), out, grid=2, cluster=2, smem=64, seed=seed)
        assert (out == 10).all()
        none = kinds(body.format(first="", last=sync), out, grid=2, cluster=2, smem=64, seed=seed)
        assert none & {"race", "uninitialised"}
        left = kinds(body.format(first=sync, last=""), out, grid=2, cluster=2, smem=64, seed=seed)
        assert left & {"race", "bounds"}  # a CTA may end while the other reads it


def test_registers_are_a_budget():
    give = "setmaxnreg.dec.sync.aligned.u32 {low};"
    take = "setmaxnreg.inc.sync.aligned.u32 {high};"
    body = f"setp.gt.u32 %p1, %r0, 255; @%p1 bra t; {give} bra e; t: {take} e:"
    fits, not_ = body.format(low=104, high=152), body.format(low=120, high=152)
    assert kinds(fits, np.zeros(1), block=512) == set()
    assert "registers" in kinds(not_, np.zeros(1), block=512)


def test_one_seed_gives_one_run():
    body = ADDRESS + "atom.global.add.u32 %r10, [%rd1], 1; " + STORE
    orders = set()
    for seed in range(6):
        twice = []
        for _ in range(2):
            out, counter = np.zeros(256, np.uint32), np.zeros(1, np.uint32)
            run(body, out, counter, block=256, seed=seed)
            twice.append(out.tobytes())
        assert twice[0] == twice[1]
        orders.add(twice[0])
    assert len(orders) > 1  # and other seeds other runs
