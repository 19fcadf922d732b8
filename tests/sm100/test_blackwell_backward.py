"""The Blackwell backward's own cases: where dQ lies, and how many launches there are.

What every target's backward must get right is in `tests/backward`.
"""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from emulated_backward import execute

from fa4core.plan.target import SM100
from fa4core.sm100.backward.spec import Spec
from fa4core.spec import MAX_HEAD_DIM
from fa4core.testing import Shape

SWEEP = pytest.mark.sweep


@pytest.mark.parametrize(
    "dims",
    [
        pytest.param((128, 128), marks=SWEEP), (96, 64), pytest.param((8, 40), marks=SWEEP),
        (192, 128), pytest.param((8, 144), marks=SWEEP), pytest.param((256, 16), marks=SWEEP),
        (256, 208), pytest.param((192, 256), marks=SWEEP),
    ],
    ids=str,
)  # fmt: skip
def test_head_dims(dims: tuple[int, int]) -> None:
    """dQ over dP, in four parts; in three parts; apart from dP. Transposed: over dP, in groups that
    overlap; apart, in one group; in two; in two launches, with one tile of Q; with one part of dQ
    staged."""
    execute("sm100", "Variant()", Shape((200,), (300,), 2, 1, *dims), dtype="float16")


def test_key_tiles_that_no_query_visits_get_zeros() -> None:
    shape = Shape((100,), (400,), 1, 1, 64, 64)
    execute("sm100", "Variant(mask=mask.sliding_window(40, 0))", shape)


def test_one_launch_or_two() -> None:
    """dK and dV are computed together where both fit into tensor memory; sums are made once."""
    specs = {dims: Spec("", "bfloat16", *dims) for dims in ((192, 128), (128, 256), (256, 256))}
    launches = {dims: [s.launch for s in spec.launches] for dims, spec in specs.items()}
    assert launches == {(192, 128): ["all"], (128, 256): ["all"], (256, 256): ["dv", "dk"]}


def test_every_pair_of_head_dims_fits() -> None:
    dims = range(8, MAX_HEAD_DIM + 1, 8)
    for d, d_v in itertools.product(dims, dims):
        for launched in Spec("", "bfloat16", d, d_v).launches:
            assert launched.smem_bytes <= SM100.smem_per_cta
            assert launched.tmem_columns <= 512
