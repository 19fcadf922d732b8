"""Bugs seeded into correct kernels are found, each by the detector that should find it.

A mutation edits the PTX of one case by a rule of `rules`. It counts as found by a kind of report,
or as "value" when the result is wrong although no report came (a wrong swizzle harms nothing but
the numbers). The unmutated kernels are the control: `test_kernels` runs them under the same seeds with
every detector on.
"""

from __future__ import annotations

from collections import Counter

import attrs
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from kernels.case import agree, run
from rules import (
    Rule,
    after_wait,
    applied,
    both,
    constant,
    drop,
    edit,
    flip_phase,
    ignore_wait,
    move,
    skip_wait,
)
from suite import BY_NAME

from fa4core.emulator.launch import EmulatorError

SEEDS = range(4)


@attrs.frozen
class Mutation:
    """kinds: the reports that may name it. every: under every seed, else under one at least."""

    name: str
    case: str
    rule: Rule
    kinds: frozenset[str]
    every: bool = True

    def __str__(self) -> str:
        return self.name


def bug(name: str, case: str, rule: Rule, kinds: str, every: bool = True) -> Mutation:
    return Mutation(name, case, rule, frozenset(kinds.split()), every)


def outcome(mutation: Mutation, seed: int) -> str:
    """The kind of the first report, "value" for a silent wrong result, "" if all is well."""
    case = BY_NAME[mutation.case]
    changed: list[bool] = []
    change = applied(mutation.rule, everywhere=False)

    def transform(launch):
        new = change(launch)
        changed.append(new is not launch)
        return new

    try:
        _, outputs, expected = run(case, seed, change=transform)
    except EmulatorError as error:
        return error.reports[0].kind
    finally:
        assert any(changed), "the rule found nothing to change"
    return "" if agree(case, outputs, expected) else "value"


PIPE = "handmade pipeline"
GEMM = "gemm bf16 two tiles"
LONG = "gemm bf16"  # five k tiles through three stages
WALK = "gemm one accumulator"
TMA = "tma rank 2 128B float32 sm100"
PAIR = "gemm pair m256"

MUTATIONS = [
    # mbarriers of a load pipeline (three stages, seven tiles)
    bug("consumer skips its first wait", PIPE, skip_wait(0), "uninitialised race"),
    bug("consumer skips a wait for reused buffer", PIPE, skip_wait(4), "race uninitialised"),
    bug("producer skips a wait for a free buffer", PIPE, skip_wait(10), "race", every=False),
    bug("consumer waits for the wrong phase", PIPE, flip_phase(0), "uninitialised race"),
    bug("producer waits for the wrong phase", PIPE, flip_phase(7), "deadlock"),
    bug("one arrival too few on the empty barrier", PIPE, drop(r"mbarrier\.arrive\.shared", 0),
        "deadlock"),
    bug("empty barrier expects one arrival less", PIPE, constant(r"mov\.b32", 128, 127, 0),
        "barrier race", every=False),
    bug("empty barrier expects one arrival more", PIPE, constant(r"mov\.b32", 128, 129, 0),
        "deadlock"),
    bug("too many bytes expected", PIPE, constant(r"mov\.b32", 2048, 2064), "deadlock"),
    bug("too few bytes expected", PIPE, constant(r"mov\.b32", 2048, 2032),
        "barrier race uninitialised deadlock"),
    bug("answer of a wait not looked at", PIPE, ignore_wait(4), "race uninitialised", every=False),
    bug("consumer releases before it reads", PIPE,
        both(drop(r"mbarrier\.arrive\.shared", 0),
             after_wait(0, "mbarrier.arrive.shared.b64 _, [%r1+24], 1;")), "race", every=False),
    bug("no barrier after mbarrier.init", PIPE, drop(r"bar\.sync"), "barrier race uninitialised"),
    bug("load signals no barrier of its own stage", PIPE,
        edit(r"cp\.async\.bulk\.tensor", r"\[%r1\+8\]", "[%r1+16]", 1), "deadlock barrier race"),
    # TMA loads and stores
    bug("no proxy fence before a TMA store", TMA, drop(r"fence\.proxy"), "race"),
    bug("no barrier before a TMA store", TMA, drop(r"bar\.sync", 1), "race uninitialised"),
    bug("no wait for a TMA load", TMA, skip_wait(), "uninitialised race"),
    bug("reads with the wrong swizzle", TMA, constant(r"and\.b32", 112, 48, 0), "value"),
    bug("reads without the swizzle", TMA, edit(r"xor\.b32", "xor", "or", 0),
        "value uninitialised bounds"),
    bug("load from the wrong coordinates", TMA,
        edit(r"cp\.async\.bulk\.tensor", r"\{(%r\d+), (%r\d+)\}", r"{\2, \1}", 0), "value"),
    bug("store before its wait of an earlier use", "pipeline classes",
        drop(r"cp\.async\.bulk\.wait_group"), "race", every=False),
    bug("no proxy fence in a store pipeline", "pipeline classes", drop(r"fence\.proxy"), "race"),
    # bounds and alignment
    bug("off by one at the end", "add ragged", constant(r"setp\.gt\.s32", 999, 1000), "bounds"),
    bug("vector access off its alignment", "gelu bf16",
        edit(r"ld\.global\.v", r"\[(%rd\d+)\]", r"[\1+4]"), "bounds"),
    bug("shared memory beyond the end", "row sum and max",
        edit(r"st\.shared", r"\[(%r\d+)(\+\d+)?\]", r"[\1+262144]", 0), "bounds"),
    # plain shared and global memory
    bug("no barrier between warps", "row sum and max", drop(r"bar\.sync", 0), "race uninitialised"),
    bug("atomic add as load and store", "histogram by atomics",
        edit(r"atom\.global", r"atom\.global\.add\.u32 (\s*%r\d+), (\[%rd\d+\]), 1;",
             r"{ .reg .b32 OLD; ld.global.u32 OLD, \2; add.u32 OLD, OLD, 1; "
             r"st.global.u32 \2, OLD; }"), "race"),
    bug("no barrier around a reused buffer", "static scheduler", drop(r"bar\.sync", 1), "race",
        every=False),
    # cp.async
    bug("no wait for cp.async", "cp.async", drop(r"cp\.async\.wait_group"), "uninitialised race"),
    bug("waits for one group too few", "cp.async", constant(r"cp\.async\.wait_group", 2, 3),
        "uninitialised race"),
    bug("no barrier after cp.async", "cp.async", drop(r"bar\.sync", 0), "uninitialised race"),
    bug("no barrier before a buffer is loaded again", "cp.async", drop(r"bar\.sync", 1), "race",
        every=False),
    # clusters
    bug("no cluster barrier before remote reads", "dsmem exchange of 2 sm100",
        drop(r"barrier\.cluster\.wait", 0), "uninitialised race", every=False),
    bug("CTA leaves while others read it", "dsmem exchange of 2 sm100",
        both(drop(r"barrier\.cluster", 3), drop(r"barrier\.cluster", 2)), "bounds race",
        every=False),
    bug("waits for a cluster barrier without arriving", "dsmem exchange of 2 sm100",
        drop(r"barrier\.cluster\.arrive", 1), "deadlock barrier"),
    bug("remote stores without waiting", "st.async of 2 sm100", skip_wait(), "uninitialised race"),
    bug("remote barrier set up too late", "st.async of 2 sm100",
        drop(r"barrier\.cluster\.(?:arrive|wait)"), "barrier race", every=False),
    bug("multicast leaves a CTA out", "multicast to 2 sm100",
        constant(r"mov\.b16", 3, 1), "deadlock barrier race"),
    # tcgen05
    bug("MMA does not wait for its operands", GEMM, skip_wait(2), "uninitialised race"),
    bug("MMA does not wait for reused buffers", LONG, skip_wait(8), "race uninitialised"),
    bug("load overwrites operands in use", LONG, skip_wait(3), "race", every=False),
    bug("operands never given back", LONG, drop(r"tcgen05\.commit", 0), "deadlock"),
    bug("end of the product never told", GEMM, drop(r"tcgen05\.commit", 2), "deadlock"),
    bug("epilogue does not wait for the product", GEMM, skip_wait(4), "uninitialised race tmem"),
    bug("epilogue reads the wrong columns", GEMM,
        edit(r"tcgen05\.ld", r"\[(%r\d+)\]", r"[\1+16]", 0), "uninitialised tmem bounds value"),
    bug("tensor memory is not freed", GEMM, drop(r"tcgen05\.dealloc"), "tmem"),
    bug("tensor memory used after it is freed", GEMM,
        move(r"tcgen05\.dealloc", 0, r"tcgen05\.ld", 0), "tmem barrier deadlock"),
    bug("accumulates on what was there", GEMM,
        edit(r"tcgen05\.mma", r"%p\d+(?=;)", "1", 0), "uninitialised"),
    bug("one accumulator, no wait for its readers", WALK, skip_wait(), "race uninitialised"),
    bug("tensor memory given back while loads are under way", WALK, drop(r"tcgen05\.wait::ld"),
        "race", every=False),
    bug("A in tensor memory without wait::st", "gemm a from tmem bf16",
        drop(r"tcgen05\.wait::st"), "race uninitialised", every=False),
    bug("no barrier before A in tensor memory is used", "gemm a from tmem bf16",
        drop(r"bar\.sync", 1), "race uninitialised", every=False),
    bug("more registers than there are", WALK, constant(r"setmaxnreg\.dec", 88, 120),
        "registers deadlock"),
    bug("commit reaches one CTA of the pair", PAIR,
        edit(r"tcgen05\.commit", r"\.multicast::cluster", "", 0), "deadlock"),
    # wgmma
    bug("accumulators read before wgmma is done", "wgmma bf16", drop(r"wgmma\.wait_group"),
        "race uninitialised"),
    bug("operands not waited for", "wgmma bf16", skip_wait(4), "uninitialised race"),
    # dynamic scheduler
    bug("response read before it is there", "dynamic scheduler", skip_wait(1),
        "uninitialised race"),
    bug("response overwritten while read", "dynamic scheduler", skip_wait(0), "race barrier",
        every=False),
]  # fmt: skip


def test_there_are_enough_mutations():
    assert len(MUTATIONS) >= 25
    assert all(count == 1 for count in Counter(m.name for m in MUTATIONS).values())


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_mutation_is_found(mutation: Mutation):
    found = [outcome(mutation, seed) for seed in SEEDS]
    wrong = {kind for kind in found if kind and kind not in mutation.kinds}
    assert not wrong, f"found as {sorted(wrong)}, expected {sorted(mutation.kinds)}"
    needed = all if mutation.every else any
    assert needed(found), f"not found under some of the seeds: {found}"
