"""Every single synchronisation statement of some kernels is removed, one at a time.

What the emulator does not find must be in `SURVIVORS`, with the reason; a statement that is in
the table and is found is an error too, so the table stays true. Reasons that are no equivalence are
blind spots, listed in docs/emulator.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import attrs
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from kernels.case import Case, agree, compiled, run
from suite import BY_NAME

from fa4core.emulator.launch import EmulatorError

SEEDS = range(4)
STATEMENTS = {
    "wait": r"mbarrier\.try_wait",
    "arrive": r"mbarrier\.arrive\.(?!expect)",
    "expect": r"mbarrier\.arrive\.expect_tx",
    "commit": r"tcgen05\.commit",
    "barrier": r"bar\.sync",
    "cluster": r"barrier\.cluster\.",
    "proxy fence": r"fence\.proxy",
    "init fence": r"fence\.mbarrier_init",
    "bulk wait": r"cp\.async\.bulk\.wait_group",
    "bulk commit": r"cp\.async\.bulk\.commit_group",
    "copy wait": r"cp\.async\.wait_group",
    "wgmma wait": r"wgmma\.wait_group",
    "wgmma fence": r"wgmma\.fence",
    "load wait": r"tcgen05\.wait::ld",
    "store wait": r"tcgen05\.wait::st",
    "dealloc": r"tcgen05\.dealloc",
    "permit": r"tcgen05\.relinquish",
}

FRESH = "the first wait for a fresh barrier, in the phase before its first, always passes"
LAST = "nothing uses the buffer, the barrier or the column again"
COVERED = "a wait or barrier that follows orders the same"
PERMIT = "only another CTA of the SM could use the permit"
INIT = "bar.sync, or the cluster barrier that follows, orders the same"
OTHER_CTAS = "a CTA's own wait for what its peers send keeps it alive long enough"
READS = "BLIND: reads need no proxy fence before an asynchronous write that a barrier orders"
ALLOCATION = "BLIND: tcgen05.alloc of a pair is taken to order its two CTAs"
EXIT = "BLIND: a CTA that ends while its bulk store still reads its shared memory"

# case -> {(kind, numbers): reason}
SURVIVORS: dict[str, dict[tuple[str, tuple[int, ...]], str]] = {
    "handmade pipeline": {
        ("wait", (7, 8, 9)): FRESH,
        ("arrive", (4, 5, 6)): LAST,
        ("init fence", (0,)): INIT,
    },
    "pipeline classes": {
        ("wait", (7, 8)): FRESH,
        ("wait", (14, 15)): OTHER_CTAS,  # the tail of a pipeline without peers
        ("barrier", (2,)): FRESH,  # the first use of the second of two buffers
        ("barrier", (14,)): LAST,
        ("init fence", (0,)): INIT,
        ("bulk wait", (0,)): FRESH,
        ("bulk wait", (6,)): COVERED,
        ("bulk wait", (7,)): EXIT,
        ("bulk commit", (6,)): EXIT,
    },
    "cp.async": {("barrier", (5, 7, 9)): LAST},
    "dynamic scheduler": {("proxy fence", (0,)): READS, ("init fence", (0,)): INIT},
    "tma rank 2 128B float32 sm100": {
        ("init fence", (0,)): INIT,
        ("bulk wait", (0,)): EXIT,
        ("bulk commit", (0,)): EXIT,
    },
    "st.async of 2 sm100": {("cluster", (3,)): OTHER_CTAS, ("init fence", (0,)): INIT},
    "multicast to 2 sm100": {("cluster", (3,)): OTHER_CTAS, ("init fence", (0,)): INIT},
    "gemm bf16 two tiles": {
        ("wait", (0, 1)): FRESH,
        ("commit", (0, 1)): LAST,
        ("init fence", (0,)): INIT,
        ("permit", (0,)): PERMIT,
    },
    "gemm one accumulator": {
        ("wait", (0, 1, 7)): FRESH,
        ("arrive", (4,)): LAST,
        ("commit", (6, 8)): LAST,
        ("init fence", (0,)): INIT,
        ("load wait", (4,)): COVERED,  # the registers are used before bar.sync and dealloc
        ("permit", (0,)): PERMIT,
    },
    "gemm a from tmem bf16": {("init fence", (0,)): INIT, ("permit", (0,)): PERMIT},
    "gemm pair m256": {
        ("wait", (0, 1, 7)): FRESH,
        ("wait", (5, 6)): OTHER_CTAS,  # the tail: commits come in order, and the last is waited for
        ("barrier", (5,)): LAST,
        ("cluster", (3,)): ALLOCATION,
        ("init fence", (0, 1)): COVERED,
        ("init fence", (2,)): ALLOCATION,
        ("bulk wait", (1,)): COVERED,
        ("bulk wait", (2,)): EXIT,
        ("bulk commit", (1,)): EXIT,
        ("permit", (0,)): PERMIT,
    },
    "wgmma bf16": {
        ("wait", (0, 1)): FRESH,
        ("init fence", (0,)): INIT,
    },
    "wgmma a from registers": {("init fence", (0,)): INIT},
}


@attrs.frozen
class Removed:
    """One statement of a kernel's PTX: the number-th of its kind."""

    kind: str
    number: int
    start: int
    stop: int

    def ptx(self, text: str) -> str:
        instead = "setp.eq.u32 P1, 0, 0;" if self.kind == "wait" else "// removed"
        return text[: self.start] + instead + text[self.stop :]


def removable(ptx: str) -> Iterator[Removed]:
    for kind, pattern in STATEMENTS.items():
        for number, match in enumerate(re.finditer(pattern + "[^;]*;", ptx)):
            yield Removed(kind, number, match.start(), match.end())


def found(case: Case, removed: Removed, ptx: str) -> bool:
    """Whether any seed shows that the statement is missing."""

    def change(launch):
        return attrs.evolve(launch, ptx=removed.ptx(ptx)) if launch.ptx == ptx else launch

    for seed in SEEDS:
        try:
            _, outputs, expected = run(case, seed, change=change)
        except EmulatorError:
            return True
        if not agree(case, outputs, expected):
            return True
    return False


CASES = [
    "handmade pipeline",
    "pipeline classes",
    "cp.async",
    "row sum and max",
    "turns through global memory",
    "dynamic scheduler",
    "tma rank 2 128B float32 sm100",
    "dsmem exchange of 2 sm100",
    "st.async of 2 sm100",
    "multicast to 2 sm100",
    "gemm bf16 two tiles",
    "gemm one accumulator",
    "gemm a from tmem bf16",
    "gemm pair m256",
    "wgmma bf16",
    "wgmma a from registers",
]


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_removed_statements_are_found(name: str):
    case = BY_NAME[name]
    ptx = compiled(case).__ptx__
    survivors = {(r.kind, r.number) for r in removable(ptx) if not found(case, r, ptx)}
    expected = {(kind, number) for kind, numbers in SURVIVORS.get(name, {}) for number in numbers}
    assert survivors == expected
