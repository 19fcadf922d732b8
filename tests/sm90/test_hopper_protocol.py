"""The checker on the Hopper forward's own role code: it is right, and every seeded bug is found."""

from __future__ import annotations

import itertools

import pytest
from seeded import bugs

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core.compile import import_dsl

import_dsl()

from fa4core.pipeline.check import ProtocolError  # noqa: E402
from fa4core.sm90.forward.protocol import ROLES, check_forward  # noqa: E402
from fa4core.sm90.forward.spec import Spec  # noqa: E402
from fa4core.sm90.forward.tuning import Shape  # noqa: E402

#: Finished rows beside Q, and inside it.
SPECS = (
    Spec("", "bfloat16", 128, 128, Shape(2, 128)),
    Spec("", "bfloat16", 256, 256, Shape(2, 80)),
    Spec("", "bfloat16", 128, 128, Shape(2, 128, turns=False)),
)
SEEDED = [bug for role, (function, _) in ROLES.items() for bug in bugs(role, function)]
LISTS = ((3, 0, 2), (1, 1, 4), (2, 5, 1))


@pytest.mark.parametrize(
    "spec",
    [
        *SPECS,
        Spec("", "float16", 64, 64, Shape(3, 128, consumer=160, producer=32)),
        Spec("", "float16", 64, 128, Shape(1, 128)),
        Spec("", "float16", 128, 128, Shape(2, 80, stages=3, turns=False)),
        Spec("", "float16", 128, 128, Shape(2, 128), split=True),
        Spec("", "float16", 64, 64, Shape(3, 96, 3, consumer=160, producer=32, turns=False)),
    ],
    ids=lambda spec: f"{spec.shape}{', split' if spec.split else ''}",
)
def test_every_short_list_of_tiles_is_safe(spec: Spec) -> None:
    """All lists of three work tiles with up to three key blocks, one CTA working through them."""
    for blocks in itertools.product(range(4), repeat=3):
        check_forward(spec, blocks)


@pytest.mark.parametrize("bug", SEEDED, ids=str)
def test_a_seeded_bug_is_found(bug) -> None:
    """Deadlock, race, missed phase or too many arrivals; the counterexample names a role."""
    with pytest.raises(ProtocolError) as found:
        for spec, blocks in itertools.product(SPECS, LISTS):
            check_forward(spec, blocks, {bug.role: bug.function})
    assert any(role in str(found.value) for role in ROLES)


def test_there_are_enough_seeded_bugs() -> None:
    assert len(SEEDED) >= 20
