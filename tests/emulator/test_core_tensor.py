"""Tensor memory and tensor cores of the core, on hand-written PTX."""

from __future__ import annotations

import numpy as np
import pytest
from core_ptx import findings, kinds, run

SEEDS = range(6)
ALLOC = """setp.gt.u32 %p1, %r0, 31; @%p1 bra have;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64; have:
bar.sync 0; ld.shared.b32 %r2, [%r1]; and.b32 %r3, %r0, 96; shl.b32 %r3, %r3, 16;
add.u32 %r4, %r2, %r3;"""
FREE = """bar.sync 0; @%p1 bra gone;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 64; gone:"""
ADDRESS = "mul.wide.u32 %rd50, %r0, 4; add.s64 %rd50, %rd50, %rd0;"
ST = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r4], {%r0};"
LD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r10}, [%r4];"
WAIT_ST, WAIT_LD = "tcgen05.wait::st.sync.aligned;", "tcgen05.wait::ld.sync.aligned;"
STORE = "st.global.b32 [%rd50], %r10;"


def test_tensor_memory_round_trip():
    for seed in SEEDS:
        out = np.zeros(128, np.uint32)
        body = ADDRESS + ALLOC + ST + WAIT_ST + LD + WAIT_LD + STORE + FREE
        run(body, out, block=128, smem=64, seed=seed)
        assert out.tolist() == list(range(128))


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (ALLOC + ST + WAIT_ST + LD + WAIT_LD + STORE, "tmem"),  # not freed
        (ALLOC + LD + WAIT_LD + STORE + FREE, "uninitialised"),
        (ALLOC + FREE + ST + WAIT_ST, "tmem"),
        (ALLOC + "add.u32 %r4, %r4, 64;" + ST + WAIT_ST + FREE, "tmem"),
        (ALLOC + "xor.b32 %r4, %r4, 2097152;" + ST + FREE, "tmem"),  # another warp's lanes
        (ALLOC.replace("64", "48") + FREE, "tmem"),
    ],
    ids=["not freed", "not written", "used after", "beyond", "other lanes", "odd size"],
)
def test_tensor_memory_rules(body: str, kind: str):
    assert kind in kinds(ADDRESS + body, np.zeros(128, np.uint32), block=128, smem=64)


def test_missing_wait_for_a_load():
    """Warp 0 loads, tells warp 1 (same lanes: warp 4), which overwrites: the load must be over."""
    write = ALLOC + "setp.gt.u32 %p5, %r0, 127; @%p5 bra nost;" + ST + "nost:" + WAIT_ST
    split = """bar.sync 0; setp.lt.u32 %p3, %r0, 32; setp.gt.u32 %p4, %r0, 127;
    @%p3 bra reader; @%p4 bra writer; bra join; reader: """
    tell = "bar.sync 1, 64;"
    overwrite = STORE + "bra join; writer: " + tell + ST + WAIT_ST + "join:"

    def body(wait: str) -> str:
        return ADDRESS + write + split + LD + wait + tell + overwrite + FREE

    for seed in SEEDS:
        out = np.zeros(160, np.uint32)
        assert kinds(body(WAIT_LD), out, block=160, smem=64, seed=seed) == set()
        assert out[:32].tolist() == list(range(32))
        assert kinds(body(""), out, block=160, smem=64, seed=seed) == {"race"}


def layout(matrix: np.ndarray) -> np.ndarray:
    """K-major without swizzle: 8 x 16-byte blocks, blocks along K 128 bytes apart, rows 256."""
    rows, k = matrix.shape
    return np.ascontiguousarray(matrix.reshape(rows // 8, 8, k // 8, 8).transpose(0, 2, 1, 3))


def bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


DESCRIPTOR = """shr.u32 %r20, {at}, 4; and.b32 %r20, %r20, 16383; or.b32 %r20, %r20, 524288;
mov.b32 %r21, 16400; mov.b64 {to}, {{%r20, %r21}};"""  # LBO 128, SBO 256, version 1
LOAD_WORDS = """mov.b32 %r30, %r0; top: setp.ge.u32 %p7, %r30, {words}; @%p7 bra over;
mul.wide.u32 %rd51, %r30, 4; add.s64 %rd51, %rd51, %rd1; ld.global.b32 %r31, [%rd51];
shl.b32 %r32, %r30, 2; add.u32 %r32, %r32, %r1; st.shared.b32 [%r32+128], %r31;
add.u32 %r30, %r30, 128; bra top; over:"""
PRODUCT = """setp.ne.u32 %p2, %r0, 0; @%p2 bra idle; mbarrier.init.shared.b64 [%r1+16], 1; idle:
{fence} bar.sync 0; @%p2 bra wait; {a} {b}
tcgen05.mma.cta_group::1.kind::f16 [%r2], %rd60, %rd61, %r40, 0;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%rd62]; wait: {wait}
tcgen05.ld.sync.aligned.32x32b.x8.b32 {{%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17}}, [%r4];
tcgen05.wait::ld.sync.aligned; mul.wide.u32 %rd50, %r0, 32; add.s64 %rd50, %rd50, %rd0;
st.global.v4.b32 [%rd50], {{%r10, %r11, %r12, %r13}};
st.global.v4.b32 [%rd50+16], {{%r14, %r15, %r16, %r17}};"""


def product_body(fence: str = "fence.proxy.async.shared::cta;", wait: bool = True) -> str:
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | (16 // 8) << 17 | (128 // 16) << 24
    spin = """{ .reg .pred P; again: mbarrier.try_wait.parity.shared.b64 P, [%r1+16], 0, 100;
    @P bra ok; bra again; ok: }"""
    a = "add.u32 %r22, %r1, 128;" + DESCRIPTOR.format(at="%r22", to="%rd60")
    b = "add.u32 %r22, %r1, 4224;" + DESCRIPTOR.format(at="%r22", to="%rd61")
    setup = f"mov.b32 %r40, {idesc}; add.u32 %r23, %r1, 16; cvt.u64.u32 %rd62, %r23;"
    words = LOAD_WORDS.format(words=(128 + 16) * 16 // 2)
    body = PRODUCT.format(fence=fence, a=a, b=b, wait=spin if wait else "")
    return ALLOC + setup + words + body + FREE


def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    a = rng.integers(-8, 8, (128, 16)).astype(np.float32)
    b = rng.integers(-8, 8, (16, 16)).astype(np.float32)
    source = np.concatenate([layout(bf16(a)).ravel(), layout(bf16(b)).ravel()])
    raw = np.zeros(128 * 8 + 4, np.float32)
    start = (-raw.ctypes.data // 4) % 4
    return a, b, source, raw[start : start + 128 * 8].reshape(128, 8)


def test_one_tensor_core_product():
    for seed in SEEDS:
        a, b, source, out = operands()
        statistics = run(product_body(), out, source, block=128, smem=8192, seed=seed)
        assert np.array_equal(out, (a @ b.T)[:, :8])
        assert statistics.mma == {"tcgen05.f16.cg1.m128n16k16 SS": 1}


def test_product_needs_fence_and_wait():
    for seed in SEEDS:
        _, _, source, out = operands()
        reports = findings(product_body(fence=""), out, source, block=128, smem=8192, seed=seed)
        assert reports[0].kind == "race"
        assert "fence.proxy.async" in reports[0].message
        found = kinds(product_body(wait=False), out, source, block=128, smem=8192, seed=seed)
        assert found & {"race", "uninitialised"}
