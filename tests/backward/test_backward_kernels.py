"""The backward kernels of every target against the float64 oracle: dQ, dK, dV, learned tensors.

A compiled kernel serves every length, layout and stride, so each variant runs on several. By
default a part of each table of cases runs, spread over it; `pytest -m sweep tests/backward` runs
the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import attrs
import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from emulated_backward import FIXED, TARGETS, execute, gradients, machine
from sampled import one_of

from fa4core.compile import statistics
from fa4core.testing import Case, LayoutSpec, Shape

SEQUSED, VARLEN = LayoutSpec("seqused", slack=3), LayoutSpec("varlen")

#: One kernel: ragged lengths, sequences without queries or without keys, GQA, packed or padded.
SHAPES = {
    "ragged": (Shape((300,), (290,), 2, 1, 64, 64), FIXED),
    "padded": (Shape((200, 0, 5, 140), (257, 40, 0, 128), 2, 1, 64, 64), SEQUSED),
    "packed": (Shape((130, 0, 260), (300, 100, 1), 2, 2, 64, 64), VARLEN),
}
VARIANTS = {
    "full": "",
    "causal": "mask=mask.causal()",
    "window": "mask=mask.sliding_window(90, 20)",
    "scattered": "mask=mask.define(lambda b, h, q, k: (q + 3 * k + h) % 7 < 5)",
    "documents": "mask=mask.document(integers(0, 4, 300, high=4).sort(-1).values)",
    "block map": "blocks=sparsity.BlockMap(bits(2, 1, 2, 5, 5), bits(3, 1, 1, 5, 5), "
    "block_q=64, block_k=96)",
    "softcap": "mask=mask.causal(), score=score.softcap(3.0)",
    "learned slopes": "mask=mask.causal(), score=score.alibi(normal(1, 2, std=0.2))",
    "learned table": "score=score.dense_bias(normal(2, 300, 300))",
    "learned distances": "score=score.define(lambda s, b, h, q, k, t=normal(3, 40): "
    "s + t[(q - k).abs() // 8])",
    "learned sink": "mask=mask.sliding_window(50), sink=sink.learned(normal(1, 2))",
    "all together": "mask=mask.causal() & mask.sliding_window(100) | mask.sink_tokens(4), "
    "score=score.alibi(normal(0, 2, std=0.1)) >> score.softcap(15.0), "
    "sink=sink.learned(normal(1, 2))",
}

targets = pytest.mark.parametrize("target", TARGETS)


def table(names: str, *axes: Iterable, every: int):
    """All combinations of the axes' values and the targets; by default one of `every`."""
    cases = [
        pytest.param(*case, marks=[pytest.mark.sweep] if i % every else [])
        for i, case in enumerate(itertools.product(*axes, TARGETS))
    ]
    return pytest.mark.parametrize(f"{names}, target", cases)


@table("name, shape", VARIANTS, SHAPES, every=11)
def test_variants(target: str, name: str, shape: str) -> None:
    execute(target, f"Variant({VARIANTS[name]})", *SHAPES[shape])


@table(
    "dims, dtype",
    [
        (8, 8),
        (40, 24),
        (64, 128),
        (96, 96),
        (128, 128),
        (128, 64),
        (192, 128),
        (256, 256),
        (40, 200),
        (128, 256),
        (256, 64),
        (192, 192),
        (256, 200),
    ],
    ["bfloat16", "float16"],
    every=17,
)
def test_head_dims(target: str, dims: tuple[int, int], dtype: str) -> None:
    """Of kernels with one CTA a work tile; those of pairs are tested apart."""
    shape = Shape((150,), (200,), 1, 1, *dims)
    given = "mask=mask.causal(), schedule=schedule.Schedule(ctas=1)"
    execute(target, f"Variant({given})", shape, dtype=dtype)


@table("dims, name, shape", [(192, 128), (256, 256)], VARIANTS, SHAPES, every=49)
def test_variants_of_large_head_dims(
    target: str, dims: tuple[int, int], name: str, shape: str
) -> None:
    small, layout = SHAPES[shape]
    large = attrs.evolve(small, head_dim=dims[0], head_dim_v=dims[1])
    execute(target, f"Variant({VARIANTS[name]})", large, layout)


@table("heads_kv", [1, 2, 6], every=5)
def test_all_query_heads_of_a_key_head_add_to_its_gradients(target: str, heads_kv: int) -> None:
    execute(target, "Variant(mask=mask.causal())", Shape((100,), (150,), 6, heads_kv, 64, 64))


@table("seqlens", [(300, 100), (130, 1), (1, 130), (1, 1)], every=3)
def test_rows_with_nothing_to_attend_to(target: str, seqlens: tuple[int, int]) -> None:
    """Causal with fewer keys than queries: no gradient, not even from an infinite LSE's."""
    queries, keys = seqlens
    results = execute(
        target, "Variant(mask=mask.causal())", Shape((queries,), (keys,), 2, 1, 64, 64)
    )
    assert not results["dq"][:, : max(0, queries - keys)].any()


@targets
@pytest.mark.parametrize("shape", [((0, 0), (5, 9)), ((7, 3), (0, 0)), ((0,), (0,))])
def test_calls_without_queries_or_without_keys(target: str, shape) -> None:
    execute(target, "Variant()", Shape(*shape, 2, 1), VARLEN)


@table("strides", ["heads_first", "sliced", "misaligned", "expanded"], every=5)
def test_strides(target: str, strides: str) -> None:
    shape = Shape((70, 70), (90, 90), 4, 2, 64, 64)
    execute(target, "Variant(mask=mask.causal())", shape, strides=strides)


@table(
    "order, source, num_sms",
    ["in_order", "shortest_first", "batch_sorted"],
    ["persistent", "one_tile"],
    [1, 3],
    every=11,
)
def test_schedules(target: str, source: str, order: str, num_sms: int) -> None:
    given = f"schedule=schedule.Schedule(source={source!r}, order={order!r})"
    shape, layout = SHAPES["packed"]
    execute(target, f"Variant(mask=mask.causal(), {given})", shape, layout, num_sms=num_sms)


@table("contents", ["large", "outliers", "constant"], every=5)
def test_magnitudes(target: str, contents: str) -> None:
    shape, layout = SHAPES["ragged"]
    execute(target, "Variant(mask=mask.causal())", shape, layout, contents=contents)


@targets
def test_scores_of_any_magnitude(target: str) -> None:
    """Weights are made of LSEs; where float32 is too coarse for that, of nothing."""
    for size in (10.0, 1e3, 1e5, 1e9, 1e17):
        shape = Shape((70,), (90,), 2, 1, 64, 64)
        inputs = Case("Variant(mask=mask.causal())", shape, dtype="bfloat16").inputs()
        with torch.no_grad():
            inputs.q.mul_(size)
            inputs.k.mul_(size)
        with machine(target):
            results = gradients(inputs, scale=0.3)
        assert all(gradient.isfinite().all() for gradient in results.values()), size
        assert size > 10.0 or results["dv"].any()


@pytest.mark.parametrize("target", one_of(2, TARGETS))
def test_weights_that_underflow(target: str) -> None:
    """A sink has all the weight but some 1e-38."""
    execute(
        target,
        "Variant(score=score.define(lambda s, b, h, q, k: s - 86.0), sink=sink.constant(0.0))",
        *SHAPES["ragged"],
    )


@table("scale", [-0.3, 0.0, 2.0], every=3)
def test_scales(target: str, scale: float) -> None:
    shape, layout = SHAPES["packed"]
    execute(target, "Variant(mask=mask.causal())", shape, layout, scale=scale)


@targets
def test_without_a_gradient_of_the_lse(target: str) -> None:
    """As if that gradient were zero."""
    shape, layout = SHAPES["packed"]
    inputs = Case("Variant(mask=mask.causal())", shape, layout, dtype="bfloat16").inputs()
    inputs.grad_lse.zero_()
    with machine(target):
        one, other = (gradients(inputs, with_lse=with_lse) for with_lse in (False, True))
    for name, found in one.items():
        torch.testing.assert_close(found, other[name], atol=2e-2, rtol=2e-2)


@targets
def test_one_kernel_serves_every_call_of_a_variant(target: str) -> None:
    for shape, layout in list(SHAPES.values())[:2]:
        execute(target, "Variant(mask=mask.causal())", shape, layout)
    before = statistics().kernels
    execute(target, "Variant(mask=mask.causal())", Shape((77,), (333,), 4, 4, 64, 64))
    assert statistics().kernels == before
