"""Backward kernels: what a block executes is the paper's, and the check can fail."""

from __future__ import annotations

import importlib.util

import attrs
import pytest
from click.testing import CliRunner

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import torch

from fa4core.cli import main
from fa4core.compile.tools import ToolMissing, find_tool
from fa4core.plan.problem import Problem
from fa4core.report.backward import examine, kernels_of, lines
from fa4core.timing import backward
from fa4core.timing.problem import model
from fa4core.variant import Variant
from primitives import mask

try:
    for tool in ("nvdisasm", "cuobjdump"):
        find_tool(tool)
except ToolMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

HAS_FA4 = importlib.util.find_spec("flash_attn") is not None
PROBLEM = Problem(
    batch=4, heads_q=16, heads_kv=16, head_dim=128, head_dim_v=128,
    seqlens_q=(8192,) * 4, seqlens_k=(8192,) * 4, dtype=torch.bfloat16,
)  # fmt: skip
WHAT = Variant(), PROBLEM, "sm100"


@pytest.fixture(scope="module")
def subject():
    return backward.ours(*WHAT, ctas=1)


@pytest.fixture(scope="module")
def ours(subject):
    return examine(subject, *WHAT)


def test_a_block_is_the_papers(ours) -> None:
    """FlashAttention-4, table 3, 128 x 128 x 128: shared memory binds one CTA."""
    assert ours.cycles["products"] == ours.paper.mma == 2560
    assert ours.cycles["shared memory"] == ours.paper.smem == 3328
    assert ours.cycles["exponentials"] == ours.paper.exp == 1024
    incoming = 2 * 128 * 128 * 2 + 2 * 128 * 4
    assert ours.block.smem.brought == incoming
    assert ours.block.smem.added == 128 * 128 * 4


def test_roles_are_found_by_what_they_do(ours) -> None:
    warps = {name: role.warps for name, role in ours.block.roles.items()}
    assert warps == {"compute": 8, "mma": 1, "load": 1, "reduce": 4, "other": 2}
    assert ours.block.roles["mma"].pipes["tensor"] == 5 * 128 / 16
    assert [s.name for s in ours.others] == ["before", "after"]


def test_the_check_compares_with_a_peer_of_as_many_ctas(ours) -> None:
    """It passes against itself, and fails against a kernel with less of anything."""
    assert all(line.ok for line in lines([ours, attrs.evolve(ours, title="fa4, 1 CTA")]))
    better = attrs.evolve(ours.main, barriers=dict.fromkeys(ours.main.barriers, 0), registers=64)
    failed = [
        x.name for x in lines([ours, attrs.evolve(ours, title="fa4", main=better)]) if not x.ok
    ]
    assert len(failed) == 4 and any("registers" in name for name in failed)
    other = attrs.evolve(ours, title="fa4, 2 CTAs", main=better, ctas=2)
    assert all(line.ok for line in lines([ours, other]))
    spilt = attrs.evolve(ours, main=attrs.evolve(ours.main, spills=1))
    assert [line.ok for line in lines([spilt])].count(False) == 1


@pytest.mark.sweep
def test_modelled_time(subject) -> None:
    found = model(subject, *WHAT, seeds=1)
    assert found.busy["tensor"] == 2560
    assert len(found.work) == 64 * 64 and found.work.blocks.sum() == 64**3
    flop = 2.5 * 4 * 8192**2 * 128 * 64
    assert found.tflops.mean == pytest.approx(flop / found.seconds.mean / 1e12)
    assert 1100 < found.tflops.mean < 1330  # shared memory binds: 4104 cycles a block
    assert found.around > 1e-4  # 0.9 GB before and after


@pytest.mark.sweep
def test_causal_blocks_are_counted_as_full_ones() -> None:
    """The first tile of keys meets all blocks of queries only if there are as many keys."""
    variant = Variant(mask=mask.causal())
    subject = backward.ours(variant, PROBLEM, "sm100", ctas=1)
    assert examine(subject, variant, PROBLEM, "sm100").block.mac == 5 * 128**3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report", "variants.full", "--backward", "--repeat", "2"], "neither a"),
        (["report", "variants.full", "--backward", "--kv-heads", "4"], "as many KV heads"),
        (["time", "variants.full", "--backward", "--kv-heads", "4"], "as many KV heads"),
        (["time", "variants.full", "--backward", "--dtype", "float32"], "float32"),
    ],
)
def test_what_is_not_taken_is_refused(arguments, said) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code and said in " ".join(result.output.split())


@pytest.mark.sweep
@pytest.mark.skipif(not HAS_FA4, reason="flash-attn-4 is not installed")
def test_ours_against_flash_attention_4() -> None:
    kernels, missing = kernels_of(*WHAT, peer=True)
    assert [k.title for k in kernels] == [
        "ours, 1 CTA", "ours, 2 CTAs", "fa4, 1 CTA", "fa4, 2 CTAs"
    ]  # fmt: skip
    assert not missing and all(line.ok for line in lines(kernels))


@pytest.mark.sweep
@pytest.mark.skipif(not HAS_FA4, reason="flash-attn-4 is not installed")
@pytest.mark.parametrize(
    ("made", "ctas", "published"),
    [
        (mask.full(), 1, 1248), (mask.full(), 2, 1360),
        (mask.causal(), 1, 1118), (mask.causal(), 2, 1209),
    ],
)  # fmt: skip
def test_published_figures_of_backward_passes(made, ctas, published) -> None:
    """B200, batch 4, 16 heads, 8192 tokens, head dim 128."""
    variant = Variant(mask=made)
    subject = backward.fa4(variant, PROBLEM, "sm100", ctas)
    found = model(subject, variant, PROBLEM, "sm100", seeds=2)
    assert found.tflops.mean == pytest.approx(published, rel=0.03)
