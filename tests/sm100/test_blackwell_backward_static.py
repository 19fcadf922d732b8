"""Static quality of the compiled backward kernel: nothing on the stack, barriers by need."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from sampled import one_of

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core.compile.tools import ToolMissing, find_tool

try:
    for tool in ("nvdisasm", "cuobjdump"):
        find_tool(tool)
except ToolMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

from fa4core import Variant
from fa4core.backward.rule import Rule
from fa4core.compile.artifact import Artifact
from fa4core.compile.build import build
from fa4core.compile.kernel import Kernel, TensorType, type_of
from fa4core.compile.sass import disassemble
from fa4core.compile.targets import resolve
from fa4core.forward.arguments import captured
from fa4core.sm100.backward.launch import BACKWARD
from fa4core.sm100.backward.spec import Spec
from primitives import mask, score

CAUSAL = mask.causal()
ALIBI = Variant(score=score.alibi(torch.ones(4, requires_grad=True)))


def compiled(variant: Variant, d: int, d_v: int = 0, launch: int = 0) -> tuple[Artifact, Counter]:
    """A main kernel's artifact, and how often each opcode is in it."""
    rule = Rule.of(variant.program)
    spec = Spec(rule.dump(), "bfloat16", d, d_v or d, derivative=not rule.is_identity)
    operand, rows, sums, table = (
        TensorType(dtype, rank)
        for dtype, rank in (("bfloat16", 4), ("float32", 2), ("float32", 3), ("int32", 2))
    )
    of_captured = tuple(TensorType("float32", max(1, c.rank), 4) for c in rule.receivers)
    arguments = (
        *(operand,) * 6, rows, rows, sums, table, table, table, type_of(captured(rule.captures)),
        of_captured, "float32", "int32",
    )  # fmt: skip
    package = build(Kernel(BACKWARD.function, arguments, spec.launches[launch], "sm100"))
    (code,) = disassemble(package.cubin)
    artifact = Artifact(resolve("sm100"), "backward", package.ptx, package.cubin)
    return artifact, Counter(i.opcode for i in code.instructions)


@pytest.mark.parametrize(
    ("variant", "dims", "launch"),
    one_of(
        2,
        [
            (Variant(mask=CAUSAL), (128, 128), 0),
            (Variant(), (128, 128), 0),
            (ALIBI, (128, 128), 0),
            (Variant(mask=CAUSAL, score=score.softcap(30.0)), (128, 128), 0),
            (Variant(mask=CAUSAL), (64, 64), 0),
            (ALIBI, (192, 128), 0),
            (Variant(mask=CAUSAL), (192, 128), 0),
            (Variant(mask=CAUSAL), (256, 256), 1),
            (Variant(mask=CAUSAL), (256, 256), 0),
        ],
    ),
    ids=[
        "causal", "full", "ALiBi with a gradient", "softcap", "d64", "d192, ALiBi with a gradient",
        "d192", "d256, dK", "d256, dV",
    ],
)  # fmt: skip
def test_no_role_keeps_anything_on_the_stack(
    variant: Variant, dims: tuple[int, int], launch: int
) -> None:
    artifact, opcodes = compiled(variant, *dims, launch)
    (used,) = artifact.resources().values()
    assert (used.stack, used.local, opcodes["LDL"] + opcodes["STL"]) == (0, 0, 0)


def test_arithmetic_is_packed_and_warps_meet_at_no_barrier() -> None:
    """For the 64 queries of a thread, in FULL and in PARTIAL tiles: half an instruction each."""
    _, opcodes = compiled(Variant(mask=CAUSAL), 128)
    assert opcodes["FFMA2"] == opcodes["FADD2"] == opcodes["FMUL2"] == 2 * 64 // 2
    assert opcodes["MUFU"] == 2 * 64
    assert (
        opcodes["UTCHMMA"] == 64
    )  # 8 for each of S, dP, dV, dK and dQ; S, dK and dQ are there twice
    assert opcodes["BAR"] <= 2  # before the roles and behind them
