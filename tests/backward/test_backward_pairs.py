"""Pairs of CTAs that share a work tile of the SM100 backward: results and the protocol's exchange.

By default one variant runs; `pytest -m sweep tests/backward/test_backward_pairs.py` runs all.
"""

from __future__ import annotations

import itertools

import attrs
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import torch
from emulated_backward import FIXED, execute
from test_backward_kernels import SHAPES, VARIANTS
from test_deterministic import CASES

from fa4core.dispatch import analysed
from fa4core.pipeline.check import ProtocolError
from fa4core.pipeline.declare import Pipeline
from fa4core.plan.plan import Plan
from fa4core.plan.problem import Problem
from fa4core.plan.target import SM90, SM100
from fa4core.sm100.backward.launch import BACKWARD
from fa4core.sm100.backward.protocol import check_backward
from fa4core.sm100.backward.spec import Spec
from fa4core.sm100.backward.tuning import NARROW
from fa4core.testing import Shape
from fa4core.variant import Variant
from primitives import mask, schedule, score

SWEEP = pytest.mark.sweep
PAIR = "schedule=schedule.Schedule(ctas=2)"
SPEC = Spec("", "bfloat16", 128, 128, ctas=2)
LISTS = ((3, 0, 2), (1, 1, 4))
AT_LEADER = {
    f"{name}_full" for name in ("k", "k_columns", "v", "q", "q_columns", "do", "do_columns")
} | {"s_read", "p_ready", "ds_ready", "dq_empty", "ds_exchanged"}


def pairs(variant: str) -> str:
    """The variant, for pairs of CTAs."""
    given = variant.removeprefix("Variant(").removesuffix(")")
    return f"Variant({given}, {PAIR})" if given else f"Variant({PAIR})"


# ---------------------------------------------------------------------------------- protocol


def test_every_pair_of_head_dims_has_a_pipeline_that_fits() -> None:
    dims = range(8, NARROW + 1, 8)
    for d, d_v, derivative in itertools.product(dims, dims, (False, True)):
        chosen = attrs.evolve(SPEC, head_dim=d, head_dim_v=d_v, derivative=derivative)
        assert chosen.smem_bytes <= SM100.smem_per_cta
        assert chosen.tmem_columns <= 512


def test_arrivals_of_the_peer_are_counted_where_they_go() -> None:
    alone = attrs.evolve(SPEC, ctas=1).pipeline
    counts = {signal.name: alone.count(signal) for signal in alone.signals}
    by_compute = counts["p_ready"]
    counts |= {"ds_copied": 4, "s_read": by_compute, "ds_exchanged": by_compute + 1}
    for signal in SPEC.pipeline.signals:
        one = counts.get(signal.name, 1)
        factor = 2 if signal.name in AT_LEADER else 1
        assert SPEC.pipeline.count(signal) == factor * one, signal.name


@attrs.frozen
class Elsewhere(Pipeline):
    """Arrivals of one reach go to another."""

    wrong: str = ""
    instead: str = ""

    def reach(self, signal, role):
        right = Pipeline.reach(self, signal, role)
        return self.instead if right == self.wrong else right


@pytest.mark.parametrize(
    "wrong, instead", [("all", "leader"), ("leader", "own"), ("peer", "own"), ("own", "all")]
)
def test_a_wrong_exchange_between_the_ctas_is_found(wrong: str, instead: str) -> None:
    """Commits that reach one CTA; signals and dS that stay in their CTA, or go to both."""
    fields = {f.name: getattr(SPEC.pipeline, f.name) for f in attrs.fields(Pipeline)}
    spec = attrs.evolve(SPEC)
    spec.__dict__["pipeline"] = Elsewhere(**fields, wrong=wrong, instead=instead)
    with pytest.raises(ProtocolError):
        for blocks in LISTS:
            check_backward(spec, blocks)


# ----------------------------------------------------------------------------------- results


def test_large_head_dims_are_refused_with_the_remedy() -> None:
    with pytest.raises(NotImplementedError, match="up to 128, not 192; use ctas=1"):
        execute("sm100", f"Variant({PAIR})", Shape((20,), (20,), 1, 1, 192, 128))


@pytest.mark.parametrize(
    "name, shape",
    [
        pytest.param(name, shape, marks=[] if name == "learned slopes" else [SWEEP])
        for name, shape in itertools.product(VARIANTS, SHAPES)
    ],
)
def test_variants_of_pairs(name: str, shape: str) -> None:
    """With an odd number of key tiles, and with sequences that leave the peer without keys."""
    number = list(VARIANTS).index(name)
    variant = pairs(f"Variant({VARIANTS[name]})")
    execute("sm100", variant, *SHAPES[shape], num_sms=1 + number % 4, seed=number % 3)


@pytest.mark.parametrize(
    "dims",
    [
        pytest.param(dims, marks=[] if dims == (128, 128) else [SWEEP])
        for dims in ((128, 128), (8, 8), (40, 24), (64, 128), (96, 96), (112, 64), (128, 16))
    ],
    ids=str,
)
def test_head_dims_of_pairs(dims: tuple[int, int]) -> None:
    """dQ between the halves of P, or apart; staged in rows of 128 bytes, or of 64."""
    execute("sm100", f"Variant({PAIR})", Shape((200,), (300,), 2, 1, *dims), dtype="float16")


@pytest.mark.parametrize(
    ("variant", "dims", "ctas"),
    [
        (Variant(), (128, 128), 2),
        (Variant(mask=mask.causal()), (128, 128), 2),
        (Variant(mask=mask.causal()), (64, 64), 1),
        (Variant(mask=mask.causal()), (128, 64), 1),
        (Variant(mask=mask.causal() & mask.sliding_window(1024, 0)), (128, 128), 1),
        (Variant(mask=mask.causal(), score=score.softcap(30.0)), (128, 128), 1),
        (Variant(schedule=schedule.Schedule(ctas=1)), (128, 128), 1),
        (Variant(schedule=schedule.Schedule(ctas=2)), (64, 64), 2),
    ],
)
def test_which_variants_have_pairs(variant: Variant, dims: tuple[int, int], ctas: int) -> None:
    """The plan says what the kernel is compiled for: pairs where the model found them quicker."""
    problem = Problem(
        batch=1, heads_q=2, heads_kv=2, head_dim=dims[0], head_dim_v=dims[1], seqlens_q=(4096,),
        seqlens_k=(4096,), dtype=torch.bfloat16,
    )  # fmt: skip
    call = analysed(variant.program, problem, None, 1.0)
    assert BACKWARD.spec_of(call, "sm100", False).ctas == ctas
    assert Plan(variant, problem, SM100).backward_tile.ctas == ctas
    if variant.schedule is None:
        assert Plan(variant, problem, SM90).backward_tile.ctas == 1


@SWEEP
@pytest.mark.parametrize("name", CASES)
def test_deterministic_pairs(name: str) -> None:
    variant, *case = CASES[name]
    first, *others = (
        execute(
            "sm100", pairs(variant), *case, dtype="float16", deterministic=True, num_sms=num_sms
        )
        for num_sms in (2, 4, 1)
    )
    for other in others:
        assert all(torch.equal(other[n], found) for n, found in first.items())


@SWEEP
@pytest.mark.parametrize("seqlens", [(300, 100), (130, 1), (1, 130), (1, 1), (0, 5), (5, 0)])
def test_few_keys_or_queries(seqlens: tuple[int, int]) -> None:
    queries, keys = seqlens
    variant = pairs("Variant(mask=mask.causal())")
    execute("sm100", variant, Shape((queries,), (keys,), 2, 1, 64, 64), FIXED)
