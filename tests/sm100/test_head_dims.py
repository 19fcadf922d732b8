"""Head dims beyond 128: two query tiles as long as the memory lasts, else one."""

from __future__ import annotations

import itertools

import pytest
from sampled import one_of

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from emulated import FIXED, execute

from fa4core.plan.target import SM100
from fa4core.sm100.forward.protocol import check_forward
from fa4core.sm100.forward.spec import Spec
from fa4core.spec import MAX_HEAD_DIM
from fa4core.testing import LayoutSpec, Shape

SEQUSED, VARLEN = LayoutSpec("seqused", slack=3), LayoutSpec("varlen")
WINDOW = (
    "Variant(mask=mask.sliding_window(150, 30) | mask.sink_tokens(4), "
    "score=score.alibi(normal(1, 2, std=0.2)), sink=sink.learned(normal(2, 2)))"
)


def spec(d: int, d_v: int) -> Spec:
    return Spec("", "bfloat16", d, d_v, tiles=SM100.forward_tile(d, d_v).stages)


def test_every_pair_of_head_dims_has_a_pipeline_that_fits() -> None:
    dims = range(8, MAX_HEAD_DIM + 1, 8)
    for d, d_v in itertools.product(dims, dims):
        chosen = spec(d, d_v)
        assert chosen.smem_bytes <= SM100.smem_per_cta
        assert chosen.tmem_columns <= 512
        assert chosen.kv_stages >= 2


@pytest.mark.parametrize("d, d_v, tiles", [(192, 128, 2), (256, 128, 1), (256, 256, 1)])
def test_large_head_dims_have_a_safe_pipeline(d: int, d_v: int, tiles: int) -> None:
    chosen = spec(d, d_v)
    assert chosen.tiles == tiles
    for blocks in ((3, 0, 2), (1, 1, 4), (2, 5, 1)):
        check_forward(chosen, blocks)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("d, d_v", [(192, 128), (256, 256)])
def test_large_head_dims(d: int, d_v: int, seed: int) -> None:
    execute(
        "Variant(mask=mask.causal())",
        Shape((300, 0, 140), (290, 40, 0), 2, 1, d, d_v),
        SEQUSED,
        seed=seed,
        num_sms=1 + 2 * seed,
    )
    execute("Variant(mask=mask.causal())", Shape((300,), (290,), 2, 1, d, d_v), FIXED, seed=seed)


@pytest.mark.parametrize("d, d_v", one_of(2, [(256, 256), (192, 128)]))
def test_large_head_dims_compose_with_masks_mods_and_sinks(d: int, d_v: int) -> None:
    execute(WINDOW, Shape((300, 7, 140), (290, 40, 128), 2, 1, d, d_v), VARLEN, num_sms=3)


@pytest.mark.parametrize(
    "d, d_v", one_of(4, [(136, 72), (64, 256), (256, 40), (208, 128), (8, 136)])
)
def test_head_dims_between(d: int, d_v: int) -> None:
    execute("Variant()", Shape((200,), (300,), 2, 2, d, d_v), dtype="float16", num_sms=1)
