"""The checker's proof in one place: every protocol of the forward, every short list of work tiles.

`pytest -m sweep tests/sm100/test_all_protocols.py` proves all lists of three work tiles with 0..6
key blocks for each; by default those with 0..2.
"""

from __future__ import annotations

import itertools

import pytest

from fa4core.compile import import_dsl

import_dsl()

from fa4core.sm100.forward.protocol import check_forward  # noqa: E402
from fa4core.sm100.forward.spec import Spec  # noqa: E402

HEAD_DIMS = {"one stage of O": (128, 128), "two stages of O": (64, 64), "fewest stages": (256, 256)}

every_protocol = pytest.mark.parametrize(
    "ctas, tiles, dynamic, dims",
    [
        pytest.param(ctas, tiles, dynamic, dims, id=f"{ctas} CTA, {tiles} tiles, {source}, {name}")
        for ctas in (1, 2)
        for tiles in (1, 2)
        for dynamic, source in ((False, "persistent"), (True, "dynamic"))
        for name, dims in HEAD_DIMS.items()
        if tiles == 1 or dims != (256, 256)
    ],
)


def prove(ctas: int, tiles: int, dynamic: bool, dims: tuple[int, int], most: int) -> None:
    spec = Spec("", "bfloat16", *dims, tiles=tiles, ctas=ctas, dynamic=dynamic)
    for blocks in itertools.product(range(most + 1), repeat=3):
        check_forward(spec, blocks)


@every_protocol
def test_lists_of_few_blocks(ctas: int, tiles: int, dynamic: bool, dims: tuple) -> None:
    prove(ctas, tiles, dynamic, dims, most=2)


@pytest.mark.sweep
@every_protocol
def test_every_list(ctas: int, tiles: int, dynamic: bool, dims: tuple) -> None:
    prove(ctas, tiles, dynamic, dims, most=6)
