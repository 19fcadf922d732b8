"""The Hopper forward against the oracle, in the emulator or on a Hopper GPU.

A compiled kernel serves every length, layout and stride, so each variant runs on several.
"""

from __future__ import annotations

import pytest
import torch
from sampled import one_of

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from hopper import execute
from hopper_gpu import GPU

from fa4core import Variant, attention
from fa4core.emulator.session import emulator
from fa4core.sm90.forward.launch import shaped
from fa4core.sm90.forward.tuning import Shape as Cut
from fa4core.testing import LayoutSpec, Shape
from primitives import mask
from primitives.schedule import Schedule

FIXED, SEQUSED, VARLEN = LayoutSpec(), LayoutSpec("seqused", slack=3), LayoutSpec("varlen")

#: One kernel: ragged lengths, sequences without queries or without keys, GQA, packed or padded.
SHAPES = {
    "ragged": (Shape((300,), (290,), 2, 1, 64, 64), FIXED),
    "padded": (Shape((300, 0, 5, 140), (257, 40, 0, 128), 2, 1, 64, 64), SEQUSED),
    "packed": (Shape((130, 0, 260), (300, 100, 1), 2, 2, 64, 64), VARLEN),
}

#: Head dims: every way in which rows, swizzles and rounding to 16 differ.
HEAD_DIMS = ((8, 8), (40, 24), (72, 96), (64, 128), (192, 128), (128, 64), (256, 256), (248, 16))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(2))
def test_full_and_its_layouts(name: str, seed: int) -> None:
    """Few CTAs, so that each works through several tiles; then one for each tile."""
    execute("Variant()", *SHAPES[name], seed=seed, num_sms=(1, 132)[seed])


def test_head_dim_128() -> None:
    execute("Variant(mask=mask.causal())", Shape((512,), (512,), 2, 1, 128, 128), contents="large")
    execute("Variant(mask=mask.causal())", Shape((200,), (70,), 1, 1, 128, 128))


@pytest.mark.parametrize("dims", one_of(3, [(dims,) for dims in HEAD_DIMS]), ids=str)
def test_head_dims(dims: tuple[int, int]) -> None:
    execute("Variant(mask=mask.causal())", Shape((150,), (200,), 2, 1, *dims), dtype="float16")


@pytest.mark.parametrize("strides", ["sliced", "heads_first", "expanded"])
def test_strides(strides: str) -> None:
    shape = Shape((150, 150), (200, 200), 2, 2, 40, 24)
    execute("Variant()", shape, dtype="float16", strides=strides, contents="outliers")


def test_few_queries() -> None:
    """One or two consumers, where a tile of three would be mostly empty."""
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


def test_queries_with_nothing_to_attend_to_beside_some_that_have() -> None:
    """Also where finished rows share shared memory with Q."""
    for d in (64, 256):
        variant = "Variant(mask=mask.causal() & mask.sliding_window(30, 30))"
        execute(variant, Shape((300,), (100,), 1, 1, d, d), num_sms=1)


def test_softcap() -> None:
    shape = Shape((260,), (300,), 2, 1, 64, 64)
    execute("Variant(mask=mask.causal(), score=score.softcap(20.0))", shape, num_sms=1)


@pytest.mark.parametrize("fraction", one_of(2, [0.25, 1.0]))
def test_polynomial_exponentials_and_eager_rescaling(fraction: float) -> None:
    variant = f"Variant(exp=exp.mixed(3, {fraction}), rescale_threshold=0.0)"
    execute(variant, Shape((140,), (400,), 1, 1, 64, 64), contents="large")


def test_scale_is_a_run_time_value_and_may_be_negative() -> None:
    for scale in (0.3, 0.0, -0.5):
        execute("Variant()", Shape((130,), (130,), 1, 1, 64, 64), scale=scale)


@pytest.mark.parametrize(
    "cut",
    one_of(
        4,
        [
            Cut(2, 176),
            Cut(2, 80, stages=3),
            Cut(1, 64),
            Cut(2, 128, turns=False),
        ],
    ),
    ids=str,
)
def test_other_shapes_of_tiles(cut: Cut) -> None:
    shape = Shape((300, 0, 5, 140), (257, 40, 0, 128), 2, 1, 64, 64)
    execute("Variant(mask=mask.causal())", shape, SEQUSED, skeleton=shaped(cut), seed=3)


@pytest.mark.parametrize("first", [96, 300])
def test_several_runs_of_key_blocks(first: int) -> None:
    """With a bias that makes the first blocks visited, which are the last, weigh most."""
    variant = (
        f"Variant(mask=mask.causal() & (mask.sliding_window({first}) | mask.sink_tokens(70)),"
        " score=score.alibi(normal(1, 2, std=1.0)))"
    )
    cut = shaped(Cut(2, 64, stages=3, turns=False))
    execute(variant, Shape((700, 0, 5), (700, 40, 0), 2, 1, 64, 64), VARLEN, skeleton=cut)


def test_a_narrow_mask() -> None:
    """At head dim 64 it has a shape of its own."""
    variant = "Variant(mask=mask.causal() & mask.sliding_window(128))"
    execute(variant, Shape((1100,), (1100,), 1, 1, 64, 64), num_sms=4)


@pytest.mark.skipif(GPU, reason="of the emulator")
def test_the_emulator_runs_the_kernels_of_its_target() -> None:
    """And with a kernel that finds no row maxima where none are wanted: the same output."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 200, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    variant = Variant(mask=mask.causal())
    with emulator("sm90", num_sms=2) as session:
        without = attention(q, k, v, variant, backend="emulator")
        out, row_max = attention(q, k, v, variant, backend="emulator", return_row_max=True)
    assert len(session.launches) == 2
    expected, wanted = attention(q, k, v, variant, backend="reference", return_row_max=True)
    assert torch.equal(out, without)
    assert (out - expected).abs().max() < 8e-3
    assert (row_max - wanted).abs().max() < 1e-4


@pytest.mark.skipif(GPU, reason="of the emulator")
def test_what_hopper_does_not_take_is_refused_with_the_reason() -> None:
    q = torch.randn(1, 20, 4, 64, dtype=torch.bfloat16)
    k = q[:, :, :2]
    for schedule, match in (
        (Schedule(source="dynamic"), "no work queue"),
        (Schedule(ctas=2), "use ctas=1"),
    ):
        with emulator("sm90"), pytest.raises(NotImplementedError, match=match):
            attention(q, k, k, Variant(schedule=schedule), backend="emulator")
