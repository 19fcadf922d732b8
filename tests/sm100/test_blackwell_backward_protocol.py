"""The checker on the backward's own role code: it is right, and every seeded bug in it is found."""

from __future__ import annotations

import itertools

import pytest
from seeded import bugs

from fa4core.compile import import_dsl

import_dsl()

from fa4core.pipeline.check import ProtocolError  # noqa: E402
from fa4core.sm100.backward.protocol import PAIR_ROLES, ROLES, check_backward  # noqa: E402
from fa4core.sm100.backward.spec import Spec  # noqa: E402

SPECS = {
    "dQ over dP": Spec("", "bfloat16", 128, 128),
    "dQ apart": Spec("", "bfloat16", 64, 64),
    "three parts of dQ, deterministic": Spec("", "float16", 96, 64, deterministic=True),
    "derivative": Spec("", "bfloat16", 128, 64, derivative=True),
    "transposed dQ over dP": Spec("", "bfloat16", 192, 128),
    "transposed dQ apart, deterministic": Spec("", "bfloat16", 128, 192, deterministic=True),
    "dV alone": Spec("", "bfloat16", 256, 256).launches[0],
    "dK with two tiles of Q": Spec("", "bfloat16", 192, 256).launches[1],
    "dK with one tile of Q": Spec("", "bfloat16", 256, 208).launches[1],
    "dK, least room": Spec("", "bfloat16", 256, 256, derivative=True).launches[1],
    "pair, dQ between the halves of P": Spec("", "bfloat16", 128, 128, ctas=2),
    "pair, dQ apart": Spec("", "bfloat16", 64, 64, ctas=2),
    "pair, three parts of dQ, deterministic": Spec(
        "", "float16", 96, 96, ctas=2, deterministic=True
    ),
}
LISTS = ((3, 0, 2), (1, 1, 4), (2, 5, 1))
EVERY = ROLES | PAIR_ROLES
SEEDED = [bug for role, (function, _) in EVERY.items() for bug in bugs(role, function)]

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@every_spec
def test_lists_of_few_query_tiles(spec: Spec) -> None:
    for blocks in (*LISTS, *itertools.product(range(3), repeat=3)):
        check_backward(spec, blocks)


@pytest.mark.sweep
@every_spec
def test_every_list_of_query_tiles(spec: Spec) -> None:
    """Three key tiles, of which each visits up to five query tiles."""
    for blocks in itertools.product(range(6), repeat=3):
        check_backward(spec, blocks)


@pytest.mark.parametrize("bug", SEEDED, ids=str)
def test_a_seeded_bug_is_found(bug) -> None:
    """In one of the pipelines: not all of them have every wait."""
    with pytest.raises(ProtocolError) as found:
        for spec, blocks in itertools.product(SPECS.values(), LISTS):
            check_backward(spec, blocks, {bug.role: bug.function})
    assert any(role in str(found.value) for role in EVERY)


def test_there_are_enough_seeded_bugs() -> None:
    assert len(SEEDED) >= 20
