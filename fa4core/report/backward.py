"""Backward kernels before they run: resources and barriers out of machine code, a block's work as
executed, the paper's reasoning, and what our kernels are held to against FlashAttention-4's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs

from fa4core.compile.artifact import Artifact
from fa4core.compile.sass import disassemble
from fa4core.compile.targets import resolve
from fa4core.emulator.host import modules
from fa4core.plan.problem import Problem
from fa4core.plan.roofline import Terms
from fa4core.plan.roofline import backward as roofline
from fa4core.plan.target import target as planned
from fa4core.report.blocks import Block, block_of
from fa4core.report.check import Line
from fa4core.report.kernel import tmem_columns_of
from fa4core.timing import backward as subjects
from fa4core.timing.small import Small
from fa4core.timing.subject import Run, Subject
from fa4core.variant import Variant

SHARED_B = 0.6  # of one CTA's B operands: a pair halves all but those of dQ, twice as long there
BARRIERS = ("SYNCS", "UTCBAR", "BAR")


@attrs.frozen
class Static:
    """What the machine code of one kernel says.

    Attributes:
        name: "main", "before" or "after".
        registers, stack, local: Of a thread at launch; bytes.
        spills: Instructions that load from or store to local memory.
        smem_bytes: Shared memory of a CTA, as it is launched.
        tmem_columns: That it allocates, if its PTX says so.
        instructions: Of the whole kernel.
        barriers: How many of them work on barriers, by opcode.
    """

    name: str
    registers: int
    stack: int
    local: int
    spills: int
    smem_bytes: int
    tmem_columns: int | None
    instructions: int
    barriers: dict[str, int]


@attrs.frozen(eq=False)
class Kernel:
    """The kernels of a backward pass.

    Attributes:
        title: Whose, and with how many CTAs a work tile.
        main: The main kernel.
        others: Those before and after it.
        block: What a CTA executes for 128 keys and a block of queries.
        queries, keys: Of a CTA's block.
        cycles: Of units for a CTA's block, from counts; see `Block.cycles`.
        paper: The roofline of a CTA's block.
        ctas: That share a work tile.
    """

    title: str
    main: Static
    others: tuple[Static, ...]
    block: Block
    queries: int
    keys: int
    cycles: dict[str, float]
    paper: Terms
    ctas: int

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return attrs.asdict(self)


def examine(subject: Subject, variant: Variant, problem: Problem, target: str) -> Kernel:
    """Compile a backward pass here, and count.

    Raises:
        NotImplementedError, ValueError: There is none for this call; with the reason.
        fa4core.compile.tools.ToolMissing: nvdisasm or cuobjdump is not installed.
    """
    small = Small.of(subject, variant, problem, target)
    run = subject.run(subject.block, subject.rows, 1, subject.ctas)
    keys = subject.rows // subject.ctas
    d, d_v = problem.head_dim, problem.head_dim_v
    block, hardware = block_of(small), planned(target)
    return Kernel(
        title=subject.title,
        main=_static("main", target, run.kernel, run.ptx, run.cubin, run.smem_bytes),
        others=_others(target, run),
        block=block,
        queries=subject.block,
        keys=keys,
        cycles=block.cycles(hardware.measured),
        paper=roofline(hardware, subject.block, keys, d, d_v, ctas=subject.ctas),
        ctas=subject.ctas,
    )


def _others(target: str, run: Run) -> tuple[Static, ...]:
    """In the order of their launches, the first one before the main kernel."""
    launches = run.around
    names = ("before", "after") if len(launches) == 2 else tuple(launch.name for launch in launches)
    return tuple(
        _static(name, target, x.kernel, x.ptx, modules.cubin_of(x.ptx), x.dynamic_smem)
        for name, x in zip(names, launches, strict=True)
    )


def _static(name: str, target: str, kernel: str, ptx: str, cubin: bytes, smem: int) -> Static:
    (code,) = (code for code in disassemble(cubin) if code.kernel == kernel)
    used = Artifact(resolve(target), kernel, ptx, cubin).resources()[kernel]
    opcodes = Counter(i.opcode for i in code.instructions)
    return Static(
        name,
        used.registers,
        used.stack,
        used.local,
        opcodes["LDL"] + opcodes["STL"],
        smem + used.shared,
        tmem_columns_of(ptx),
        len(code.instructions),
        {opcode: opcodes[opcode] for opcode in BARRIERS},
    )


def kernels_of(
    variant: Variant, problem: Problem, target: str, peer: bool
) -> tuple[list[Kernel], str]:
    """Ours with one CTA a work tile and with two, then FlashAttention-4's likewise; and what there
    is no kernel of."""
    found, missing = [], []
    makers = [subjects.ours, *([subjects.fa4] if peer else [])]
    for make in makers:
        for ctas in (1, 2):
            try:
                subject = make(variant, problem, target, ctas)
            except NotImplementedError as refused:
                if ctas == 1:
                    raise
                missing.append(str(refused))
                continue
            found.append(examine(subject, variant, problem, target))
    return found, "; ".join(missing)


def lines(kernels: list[Kernel]) -> list[Line]:
    """What our kernels are held to: each of ours to the peer's with as many CTAs, if there is one,
    and to the paper's reasoning."""
    ours = [k for k in kernels if k.title.startswith("ours")]
    peers = {k.ctas: k for k in kernels if k not in ours}
    found = []
    for kernel in ours:
        for one in (kernel.main, *kernel.others):
            spilt = one.spills + one.stack + one.local
            name = f"{kernel.title}, {one.name}: no spills and no stack"
            found.append(Line(name, spilt, 0, "instructions or bytes"))
        if kernel.ctas in peers:
            found += _against(kernel, peers[kernel.ctas])
        found += _reasoning(kernel)
    by_ctas = {k.ctas: k.block.smem for k in ours}
    if len(by_ctas) == 2:
        one_cta, pair = by_ctas[1], by_ctas[2]
        found += [
            Line("a pair of ours: B operands, halved", pair.b, SHARED_B * one_cta.b, "bytes"),
            Line("a pair of ours: added to dQ, halved", pair.added, one_cta.added / 2, "bytes"),
        ]
    return found


def _against(ours: Kernel, peer: Kernel) -> list[Line]:
    pairs: list[tuple[str, float, float, str]] = [
        ("registers at launch", ours.main.registers, peer.main.registers, "a thread"),
        ("bytes through shared memory", ours.block.smem.all, peer.block.smem.all, "a block"),
        (
            "barrier operations", ours.block.barrier_operations, peer.block.barrier_operations,
            "a block, all warps",
        ),
    ]  # fmt: skip
    pairs += [
        (f"{opcode} instructions", ours.main.barriers[opcode], peer.main.barriers[opcode], "in all")
        for opcode in BARRIERS
    ]
    return [Line(f"{ours.title}: {name}", *rest) for name, *rest in pairs]  # type: ignore[arg-type]


def _reasoning(kernel: Kernel) -> list[Line]:
    """What is counted is at most what the paper counts; one CTA is bound by shared memory."""
    products, shared = (kernel.cycles[unit] for unit in ("products", "shared memory"))
    found = [
        Line(f"{kernel.title}: products, by the paper", products, kernel.paper.mma, "cycles"),
        Line(
            f"{kernel.title}: shared memory, by the paper",
            shared, kernel.paper.smem, "cycles",
        ),
    ]  # fmt: skip
    if kernel.ctas == 1:
        name = f"{kernel.title}: products take less than shared memory"
        found.append(Line(name, products, shared, "cycles"))
    return found
