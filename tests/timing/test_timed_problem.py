"""Whole problems: what the model says about our kernel and FlashAttention-4's, run end to end."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import torch

from fa4core.cli import main
from fa4core.compile.tools import ToolMissing, find_tool
from fa4core.plan.plan import Plan
from fa4core.plan.problem import Problem
from fa4core.plan.target import SM100
from fa4core.timing import peer, subject
from fa4core.timing.problem import model
from fa4core.timing.roles import roles_of
from fa4core.timing.spots import spots_of
from fa4core.variant import Variant
from primitives import mask
from primitives.schedule import Schedule

try:
    find_tool("nvdisasm")
except ToolMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

HAS_FA4 = importlib.util.find_spec("flash_attn") is not None
CAUSAL = Variant(mask=mask.causal())
MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "forward_h200.json"


def problem(seqlen: int, batch: int = 4) -> Problem:
    return Problem(
        batch=batch, heads_q=16, heads_kv=16, head_dim=128, head_dim_v=128,
        seqlens_q=(seqlen,) * batch, seqlens_k=(seqlen,) * batch, dtype=torch.bfloat16,
    )  # fmt: skip


@pytest.fixture(scope="module")
def ours():
    p = problem(8192)
    return model(subject.ours(CAUSAL, p, "sm100"), CAUSAL, p, "sm100", seeds=2)


def test_products_of_a_key_block_are_the_papers(ours):
    """Table 1 of FlashAttention-4, for every 128 queries: 1024 cycles of products; shared memory
    768, and 256 for the bytes of a K and a V tile that come in."""
    tiles = ours.rows // ours.ctas // 128
    assert ours.busy["tensor"] == 1024 * tiles
    incoming = 2 * 128 * 128 * 2 / 128
    expected = (768 * tiles if ours.ctas == 1 else 512 * tiles) + incoming / ours.ctas
    assert ours.busy["SMEM"] == pytest.approx(expected, rel=0.05)


def test_time_follows_from_tiles_and_blocks(ours):
    blocks, tiles = float(ours.work.blocks.sum()), len(ours.work)
    cycles = blocks * ours.block_cycles.mean + tiles * ours.tile_cycles.mean
    machines = ours.sms // ours.ctas
    assert ours.cycles.mean >= cycles / machines
    assert ours.cycles.mean <= 1.05 * cycles / machines + 20_000
    flop = 4 * 8192**2 / 2 * 128 * 16 * 4
    assert ours.tflops.mean == pytest.approx(flop / ours.seconds.mean / 1e12, rel=0.01)
    assert ours.tflops.mean < 2250


def test_plans_estimate_with_the_cycles_of_the_model(ours):
    """`python benchmarks/pipeline_costs.py` makes the constants anew."""
    cost, bound = SM100.cost(128), Plan(CAUSAL, problem(8192)).roofline().cycles
    assert bound / cost.efficiency == pytest.approx(ours.block_cycles.mean, rel=0.05)
    assert cost.setup_cycles == pytest.approx(ours.setup_cycles.mean, rel=0.25)
    besides = ours.tile_cycles.mean + ours.setup_cycles.mean
    assert cost.tile_cycles == pytest.approx(besides, rel=0.25)


def test_the_cycles_of_a_role_add_up(ours):
    roles = roles_of(ours.program, ours.many)
    assert sum(len(r.warps) for r in roles) == len({w for _, w, _ in ours.program.warps})
    for role in roles:
        assert math.isclose(sum(role.spent.values()), 1.0)
    assert sum("products" in r.does for r in roles) == 1


def test_cycles_lost_in_front_of_instructions_have_a_place(ours):
    spots = spots_of(ours, 10)
    assert [s.cycles for s in spots] == sorted((s.cycles for s in spots), reverse=True)
    warps = len({w for _, w, _ in ours.program.warps})
    assert 0 < sum(s.cycles for s in spots) < warps * ours.block_cycles.mean
    assert spots[0].reason == "mbarrier" and ".py:" in spots[0].source


@pytest.mark.skipif(not HAS_FA4, reason="flash-attn-4 is not installed")
@pytest.mark.parametrize(
    ("made", "published", "within"),
    [(mask.causal(), 1418.1, 0.10), (mask.full(), 1534.8, 0.05)],
    ids=["causal", "full"],
)
def test_published_figures_of_flash_attention_4(made, published, within):
    """B200, batch 4, 16 heads, 8192 tokens, head dim 128: flash-attention's pull request 2280."""
    variant, p = Variant(mask=made), problem(8192)
    found = model(peer.fa4(variant, p, "sm100"), variant, p, "sm100", seeds=2)
    assert found.tflops.mean == pytest.approx(published, rel=within)


@pytest.mark.skipif(not HAS_FA4, reason="flash-attn-4 is not installed")
@pytest.mark.parametrize(
    ("made", "seqlen", "target", "tile"),
    [
        (mask.full(), 8192, "sm100", (512, 2, False)),  # 2 CTAs, 2 query tiles in each; persistent
        (mask.causal(), 8192, "sm100", (256, 1, True)),
        (mask.causal(), 256, "sm100", (256, 1, False)),  # one work tile: a persistent kernel
        (mask.full(), 128, "sm100", (128, 1, False)),
        (mask.causal(), 8192, "sm90", (128, 1, False)),
    ],
)
def test_work_tiles_of_flash_attention_4_are_those_of_the_problem(made, seqlen, target, tile):
    found = peer.fa4(Variant(mask=made), problem(seqlen), target)
    assert (found.rows, found.ctas, found.several) == tile


@pytest.mark.skipif(not HAS_FA4, reason="flash-attn-4 is not installed")
def test_flash_attention_4_with_one_cta_where_it_takes_two():
    found = peer.fa4(Variant(mask=mask.full()), problem(8192), "sm100", ctas=1)
    assert (found.rows, found.ctas, found.title) == (256, 1, "fa4, 1 CTA")
    with pytest.raises(NotImplementedError, match="no kernel with 2 CTAs"):
        peer.fa4(CAUSAL, problem(8192), "sm100", ctas=2)


@pytest.mark.skipif(not HAS_FA4, reason="flash-attn-4 is not installed")
def test_another_kernel_than_the_problems_is_refused():
    """For one work tile, FlashAttention-4's causal kernel is another than for many."""
    found = peer.fa4(CAUSAL, problem(8192), "sm100")
    with pytest.raises(NotImplementedError, match=r"another kernel .* is_static_persistent=True"):
        found.run(found.rows, 2048, 1, 1)


@pytest.mark.sweep
@pytest.mark.parametrize("coordinates", ["packed_gqa", "split_kv"])
def test_work_tiles_of_groups_and_of_shares(coordinates):
    """Sixteen rows of eight heads, or a quarter of the keys: as many products as one head's."""
    schedule = Schedule(coordinates, "dynamic", num_splits=4 if coordinates == "split_kv" else 1)
    variant = Variant(mask=mask.causal(), schedule=schedule)
    p = attrs.evolve(problem(4096, batch=1), heads_kv=2)
    found = model(subject.ours(variant, p, "sm100"), variant, p, "sm100", seeds=1)
    packed, shares = found.packed, schedule.num_splits
    assert (packed, found.rows) == ((8, 32) if shares == 1 else (1, 256))
    assert found.busy["tensor"] == 2048
    assert len(found.work) == 16 * 4096 // 256 * shares
    whole = model(subject.ours(CAUSAL, p, "sm100"), CAUSAL, p, "sm100", seeds=1)
    assert found.block_cycles.mean == pytest.approx(whole.block_cycles.mean, rel=0.10)


def test_packed_sequences_are_taken_and_pages_refused():
    packed = attrs.evolve(
        problem(256, batch=3), seqlens_q=(8, 256, 0), seqlens_k=(8, 256, 0), starts_q=(0, 8, 264),
        starts_k=(0, 8, 264),
    )  # fmt: skip
    assert subject.ours(CAUSAL, packed, "sm100").rows == 256
    with pytest.raises(NotImplementedError, match="pages"):
        subject.ours(CAUSAL, attrs.evolve(packed, starts_k=None, page_size=64), "sm100")


def test_measured_on_an_h200():
    """Ours, 4 x 8192 tokens, causal: what `benchmarks/speed.py` measured."""
    p = problem(8192)
    found = model(subject.ours(CAUSAL, p, "sm90"), CAUSAL, p, "sm90", seeds=1)
    measured = json.loads(MEASURED.read_text())
    wanted = ("causal", 128, 8192)
    (cell,) = (c for c in measured["cells"] if (c["variant"], c["head_dim"], c["seqlen"]) == wanted)
    assert found.tflops.mean == pytest.approx(cell["results"]["ours"]["tflops"], rel=0.08)
    assert found.busy["tensor"] == 4 * 128**3 / 4096
    (consumers,) = (r for r in roles_of(found.program, found.many) if "products" in r.does)
    assert len(consumers.warps) == 8


def test_command(tmp_path):
    path = tmp_path / "time.json"
    arguments = ["time", "variants.causal", "--seqlen", "2048", "--seeds", "1", "--json", str(path)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "Modelled time at 1.85 GHz" in result.output
    (found,) = json.loads(path.read_text())
    assert found["modelled"] and found["seconds"][0] > 0


def test_what_is_not_modelled_is_refused():
    result = CliRunner().invoke(main, ["time", "variants.causal", "--dtype", "float32"])
    assert result.exit_code == 1 and "float32" in result.output
