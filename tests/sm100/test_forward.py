"""The forward kernel, executed by the emulator with every detector on, against the oracle.

A compiled kernel serves every length, layout and stride, so each variant runs on several.
"""

from __future__ import annotations

import pytest
import torch
from sampled import one_of

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from emulated import execute

from fa4core import Variant, attention
from fa4core.compile import statistics
from fa4core.testing import LayoutSpec, Shape

FIXED, SEQUSED, VARLEN = LayoutSpec(), LayoutSpec("seqused", slack=3), LayoutSpec("varlen")

#: One kernel: ragged lengths, sequences without queries or without keys, GQA, packed or padded.
SHAPES = {
    "ragged": (Shape((300,), (290,), 2, 1, 64, 64), FIXED),
    "padded": (Shape((300, 0, 5, 140), (257, 40, 0, 128), 2, 1, 64, 64), SEQUSED),
    "packed": (Shape((130, 0, 260), (300, 100, 1), 2, 2, 64, 64), VARLEN),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_full_and_its_layouts(name: str, seed: int) -> None:
    """Few CTAs, so that each works through several tiles; then one for each tile."""
    execute("Variant()", *SHAPES[name], seed=seed, num_sms=(1, 148)[seed])


def test_head_dim_128() -> None:
    execute("Variant(mask=mask.causal())", Shape((512,), (512,), 2, 1, 128, 128), contents="large")
    execute("Variant(mask=mask.causal())", Shape((200,), (70,), 1, 1, 128, 128))


def test_unequal_head_dims_of_no_power_of_two() -> None:
    shape = Shape((150,), (200,), 2, 2, 40, 24)
    execute("Variant()", shape, dtype="float16", contents="outliers")
    execute("Variant()", shape, dtype="float16", strides="sliced")
    execute("Variant()", shape, dtype="float16", strides="heads_first")


def test_one_query_tile() -> None:
    """At most 128 queries: the pipeline has one tile, and eight warps fewer."""
    execute("Variant()", Shape((100,), (300,), 4, 2, 64, 64), num_sms=3)
    execute("Variant()", Shape((1,), (1,), 1, 1, 64, 64))
    execute("Variant()", Shape((5,), (0,), 1, 1, 64, 64))


@pytest.mark.parametrize("name", one_of(3, SHAPES))
def test_masks_compose_with_mods_and_sinks(name: str) -> None:
    """Run-time windows, per-head tables, a bias and a sink in one kernel."""
    shape, layout = SHAPES[name]
    longest = max(*shape.seqlens_q, *shape.seqlens_k)
    variant = (
        "Variant(mask=mask.sliding_window(100, 20) & ~mask.document(integers("
        f"0, {shape.batch}, {longest}, high=3)) | mask.sink_tokens(4), "
        "score=score.alibi(normal(1, 2, std=0.2)), sink=sink.learned(normal(2, 2)))"
    )
    execute(variant, shape, layout)


def test_mods_with_long_code_go_through_tensor_memory() -> None:
    shape = Shape((260,), (300,), 2, 1, 64, 64)
    long = "lambda score, b, h, q_idx, kv_idx: torch.sin(score) * 4.0 + (q_idx - kv_idx) % 7 / 8.0"
    execute(f"Variant(mask=mask.causal(), score=score.define({long}))", shape, num_sms=1)


@pytest.mark.parametrize(
    "fraction",
    [pytest.param(x, marks=pytest.mark.sweep) for x in (0.0, 0.125, 1.0)],
)
def test_quick_functions_by_both_units(fraction: float) -> None:
    """Scores far beyond the cap, too, where tanh is 1."""
    shape = Shape((130,), (200,), 1, 1, 64, 64)
    policy = f"exp=exp.mixed(3, {fraction})"
    execute(f"Variant(mask=mask.causal(), score=score.softcap(20.0), {policy})", shape)
    execute(f"Variant(score=score.softcap(2.0), {policy})", shape, contents="outliers")
    logistic = "lambda score, b, h, q_idx, kv_idx: torch.sigmoid(score) * torch.exp(-score.abs())"
    execute(f"Variant(score=score.define({logistic}), {policy})", shape, dtype="float16")
    far = (
        "lambda score, b, h, q_idx, kv_idx: torch.exp(score / 4) - torch.sigmoid(score * 1e4) + "
        "torch.minimum(torch.exp2(score * (kv_idx * 20)), torch.full_like(score, 3.0))"
    )  # from 0 to infinity
    execute(f"Variant(score=score.define({far}), {policy})", shape)


def test_captured_tables_of_any_layout_share_a_kernel() -> None:
    """Transposed, expanded and sliced tables behind a contiguous one: no new kernel."""
    shape = Shape((130,), (140,), 2, 2, 64, 64)
    tables = (
        "normal(1, 130, 140)",
        "normal(1, 140, 130).detach().t()",
        "normal(1, 1, 140).detach().expand(130, 140)",
        "normal(1, 130, 280).detach()[:, 1::2]",
    )
    compiled = statistics().kernels
    for table in tables:
        execute(f"Variant(score=score.dense_bias({table}))", shape)
    assert statistics().kernels == compiled + 1


@pytest.mark.parametrize("fraction", one_of(2, [0.25, 1.0]))
def test_polynomial_exponentials_and_eager_rescaling(fraction: float) -> None:
    variant = f"Variant(exp=exp.mixed(3, {fraction}), rescale_threshold=0.0)"
    execute(variant, Shape((140,), (400,), 1, 1, 64, 64), contents="large")


def test_scale_is_a_run_time_value_and_may_be_negative() -> None:
    shape = Shape((130,), (130,), 1, 1, 64, 64)
    for scale in (0.3, 0.0, -0.5):
        execute("Variant()", shape, scale=scale)


# ------------------------------------------------------------------------------- public entry


def small(dtype: torch.dtype = torch.bfloat16, **sizes) -> list[torch.Tensor]:
    d, d_v = sizes.get("d", 64), sizes.get("d_v", 64)
    return [torch.randn(1, 20, 1, n, dtype=dtype) for n in (d, d, d_v)]


def refused(match: str, *tensors: torch.Tensor, **options) -> None:
    with pytest.raises((NotImplementedError, ValueError), match=match):
        attention(*tensors, backend="emulator", **options)


def test_what_the_kernel_does_not_take_is_refused_with_the_reason() -> None:

    refused("float32", *small(torch.float32))
    refused("head dim 20 is no multiple of 8 from 8 to 256; pad", *small(d=20))
    refused("head dim of v 264", *small(d_v=264))
    q, k, v = small(d=64)
    doubles = torch.zeros(1, dtype=torch.float64)
    from primitives import score

    biased = Variant(score=score.define(lambda s, b, h, q, k: s + doubles[h]))
    refused("float64", q, k, v, variant=biased)
