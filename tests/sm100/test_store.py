"""The store role: its protocol with one and two stages; coordinate maps with other schedules."""

from __future__ import annotations

import itertools

import pytest
from sampled import one_of

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from emulated import execute

from fa4core.sm100.forward.protocol import check_forward
from fa4core.sm100.forward.spec import Spec
from fa4core.testing import LayoutSpec, Shape

SPECS = {
    "one stage": Spec("", "bfloat16", 208, 128),
    "two stages": Spec("", "bfloat16", 128, 128),
    "parts of half the columns": Spec("", "bfloat16", 64, 128, split=True),
    "a pair": Spec("", "bfloat16", 208, 128, ctas=2, split=True),
}


@pytest.mark.parametrize("name", SPECS)
def test_every_short_list_of_tiles_is_safe(name: str) -> None:
    spec = SPECS[name]
    assert spec.out_stages == (1 if spec.head_dim > 200 else 2)
    assert spec.out_parts == (4 if spec.split else 2)
    for blocks in itertools.product(range(4 if spec.ctas == 2 else 5), repeat=3):
        check_forward(spec, blocks)


def test_one_stage_serves_both_tiles() -> None:
    shape = Shape((300, 0, 20), (130, 40, 0), 2, 1, 208, 72)
    execute("Variant(mask=mask.causal())", shape, LayoutSpec("varlen"), num_sms=1)


@pytest.mark.parametrize(
    "chosen",
    one_of(
        2,
        [
            "coordinates='split_kv', num_splits=3, source='dynamic'",
            "coordinates='split_kv', num_splits=2, ctas=2",
            "coordinates='packed_gqa', source='dynamic', order='shortest_first'",
        ],
    ),
)
def test_coordinate_maps_go_with_work_sources_orders_and_pairs(chosen: str) -> None:
    variant = (
        "Variant(mask=mask.causal(), sink=sink.learned(normal(2, 6)), "
        f"schedule=schedule.Schedule({chosen}))"
    )
    shape = Shape((150, 0, 40, 3), (330, 40, 0, 200), 6, 2, 64, 64)
    execute(variant, shape, LayoutSpec("varlen"), num_sms=2)
