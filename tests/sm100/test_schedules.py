"""Work sources x orders in the emulator, against the oracle. Two kernels serve all of them."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from emulated import execute

from fa4core.testing import LayoutSpec, Shape
from primitives.schedule import Order, Source

CASES = list(itertools.product(get_args(Source), get_args(Order), (False, True)))

#: Unequal sequences, one without queries, one without keys, rows with nothing to attend to, GQA.
SHAPES = (
    (Shape((300, 0, 70, 270), (290, 50, 0, 130), 2, 1, 64, 64), LayoutSpec("varlen")),
    (Shape((270,), (400,), 4, 2, 64, 64), LayoutSpec()),
)


@pytest.mark.parametrize("source, order, sections", CASES)
def test_every_source_and_order(source: str, order: str, sections: bool) -> None:
    case = CASES.index((source, order, sections))
    schedule = f"schedule.Schedule(source={source!r}, order={order!r}, l2_sections={sections})"
    shape, layout = SHAPES[case % 2]
    execute(
        f"Variant(mask=mask.causal(), schedule={schedule})", shape, layout,
        seed=case, num_sms=1 + case % 4,
    )  # fmt: skip
