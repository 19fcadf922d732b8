"""The static report on kernels compiled here: its figures agree with what the kernels must do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from sampled import one_of

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core.cli import main
from fa4core.compile.tools import ToolMissing, find_tool

try:
    for tool in ("nvdisasm", "cuobjdump"):
        find_tool(tool)
except ToolMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

import torch

from fa4core.plan.problem import Problem
from fa4core.report.check import lines
from fa4core.report.cli import Subject
from fa4core.report.figures import Figures
from fa4core.report.kernel import Kernel
from fa4core.variant import Variant
from primitives import exp, mask, score
from primitives.schedule import Schedule


def problem(d: int, seqlen: int = 1024) -> Problem:
    return Problem(
        batch=1, heads_q=2, heads_kv=2, head_dim=d, head_dim_v=d,
        seqlens_q=(seqlen,), seqlens_k=(seqlen,), dtype=torch.bfloat16,
    )  # fmt: skip


def kernel(variant: Variant, d: int = 64, seqlen: int = 1024) -> tuple[Subject, Kernel]:
    subject = Subject.of(variant, problem(d, seqlen), "sm100")
    return subject, subject.examine("ours", subject.compile(), smem_bytes=subject.spec.smem_bytes)


def exponentials(figures: Figures) -> float:
    return figures.count("MUFU.EX2")


@pytest.fixture(scope="module")
def plain() -> tuple[Subject, Kernel]:
    return kernel(Variant(exp=exp.hardware()))


def test_a_row_has_128_exponentials(plain) -> None:
    """The factor of what was accumulated is one more where the maximum has grown, in a branch."""
    _, k = plain
    found = [exponentials(k.figures["softmax", way]) for way in ("shortest", "longest")]
    assert found == [128, 128 + 1]


def test_emulated_exponentials_leave_the_unit(plain) -> None:
    fraction = 0.25
    _, k = kernel(Variant(exp=exp.mixed(3, fraction)))
    softmax, all_hardware = (x.figures["softmax", "shortest"] for x in (k, plain[1]))
    assert exponentials(softmax) == 128 - 128 * fraction
    fma = [f.pipes["FMA"] + f.pipes["FMA x2"] for f in (softmax, all_hardware)]
    assert fma[0] > fma[1]


@pytest.mark.parametrize("d, seqlen", one_of(2, [(64, 100), (128, 1024)]))
def test_products_and_tensor_cycles_follow_from_the_tiles(d: int, seqlen: int) -> None:
    """An MMA instruction takes 16 of the contracted dimension: d for S, 128 keys for O."""
    subject, k = kernel(Variant(exp=exp.hardware()), d, seqlen)
    tiles = subject.spec.tiles
    assert tiles == (1 if seqlen <= 128 else 2)
    assert k.figures["mma", "shortest"].pipes["tensor"] == tiles * (d // 16 + 128 // 16)
    tensor = k.cycles["unmasked"].units["tensor"]
    assert tensor == pytest.approx(tiles * 4 * 128 * 128 * d / 8192)


def test_a_mask_costs_on_masked_tiles_only(plain) -> None:
    _, k = kernel(Variant(mask=mask.causal(), exp=exp.hardware()))
    full, partial = (k.figures["softmax", way] for way in ("shortest", "longest"))
    assert partial.pipes["ALU"] > full.pipes["ALU"] + 64
    assert exponentials(full) + 1 == exponentials(partial)  # there, the factor is no branch


def test_a_pair_of_ctas_reads_half_of_every_b_operand(plain) -> None:
    """So measured, so modelled: 3 operands of a tile are read from SMEM, 2 of them B."""
    pair = Variant(exp=exp.hardware(), schedule=Schedule(ctas=2))
    subject, k = kernel(pair)
    assert k.figures["mma", "shortest"].count("UTCHMMA.2CTA")
    smem, alone = (
        x.cycles["unmasked"].units["SMEM"] - subject.roofline["unmasked"].units["SMEM"]
        for subject, x in ((subject, k), plain)
    )
    assert smem == pytest.approx(alone, abs=32)  # what is left: statistics in SMEM
    assert subject.roofline["unmasked"].units["SMEM"] == pytest.approx(2 * 384 * 2 / 3)
    assert k.cycles["unmasked"].units["tensor"] == plain[1].cycles["unmasked"].units["tensor"]


def test_long_mods_are_counted_as_often_as_they_run() -> None:
    """128 scores are 128 tanh and 128 exp2 of the unit, in a loop or not."""
    _, k = kernel(Variant(score=score.softcap(20.0), exp=exp.hardware()))
    for way in ("shortest", "longest"):
        assert k.figures["softmax", way].pipes["MUFU"] >= 128 + 128


def test_resources_are_those_declared(plain) -> None:
    subject, k = plain
    assert k.registers * subject.spec.pipeline.threads <= 65_536
    assert k.tmem_columns == subject.spec.tmem_columns
    assert k.smem_bytes == subject.spec.smem_bytes
    assert set(k.figures) == {
        (role, way)
        for role in ("softmax", "correction", "mma", "load")
        for way in ("shortest", "longest")
    }


def test_the_mma_warp_does_what_the_pipeline_declares(plain) -> None:
    """Per key block: waits for K, V, and for both parts of P of every tile; commits S of every
    tile, K and V."""
    subject, k = plain
    mma, tiles = k.figures["mma", "shortest"], subject.spec.tiles
    assert mma.waits == 2 + 2 * tiles
    assert mma.arrivals == 2 + tiles


def test_the_check_can_fail(plain) -> None:
    import attrs

    _, k = plain
    same = {line.name: line.ok for line in lines(k, None, k)}
    assert same["registers at launch"]
    worse = attrs.evolve(k, registers=k.registers + 8, stack=8, spills=2)
    failed = [line.name for line in lines(worse, k, k) if not line.ok]
    assert {"no spills", "no stack", "registers at launch"} <= set(failed)
    softmax = k.figures["softmax", "shortest"]
    (binding,) = (name for name in same if name.startswith("binding pipe, "))
    pipe = binding.removeprefix("binding pipe, ")  # which one, the compiler has a say in
    slower = attrs.evolve(softmax, pipes=softmax.pipes | {pipe: softmax.pipes[pipe] + 1})
    worse = attrs.evolve(k, figures=k.figures | {("softmax", "shortest"): slower})
    failed = [line.name for line in lines(worse, k, k) if not line.ok]
    assert same[binding] and binding in failed
    assert any("FULL tile" in name for name in failed)


# ------------------------------------------------------------------------------- command line


def report(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["report", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_the_command_prints_and_writes(tmp_path: Path, plain) -> None:
    cubin = tmp_path / "peer.cubin"
    cubin.write_bytes(plain[0].compile().cubin)
    out = tmp_path / "figures.json"
    arguments = ("--head-dim", "64", "--seqlen", "1024", "--peer", str(cubin), "--json", str(out))
    text = report("variants.full", *arguments)
    assert "128 x 128 tile" in text and "ratio" in text and "Modelled cycles" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    written = json.loads(out.read_text())
    ours, peer = written["kernels"]
    assert ours["registers"] == peer["registers"] and peer["smem_bytes"] is None
    assert {f["role"] for f in ours["figures"]} == {"softmax", "correction", "mma", "load"}


def test_wrong_requests_say_what_is_accepted(tmp_path: Path) -> None:
    """Before anything is compiled."""
    text = tmp_path / "text.cubin"
    text.write_text("nothing")
    for path in (text, tmp_path / "missing.cubin"):
        assert "is no cubin" in report("variants.full", "--peer", str(path), code=2)
    assert "--peer" in report("variants.full", "--check", code=2)
    wanted = report("variants.full", "--dtype", "float32", code=1)
    assert "bfloat16 and float16" in wanted


def test_a_peer_that_cannot_be_compiled_is_refused_before_the_work() -> None:
    assert "full, causal and windowed" in report("variants.alibi", "--peer", "fa4", code=1)
