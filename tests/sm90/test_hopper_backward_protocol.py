"""The checker on the Hopper backward's own role code: it is right, every seeded bug is found."""

from __future__ import annotations

import itertools

import pytest
from seeded import bugs

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core.compile import import_dsl

import_dsl()

from fa4core import Variant  # noqa: E402
from fa4core.backward.rule import Rule  # noqa: E402
from fa4core.pipeline.check import ProtocolError  # noqa: E402
from fa4core.sm90.backward.protocol import check_backward, roles_of  # noqa: E402
from fa4core.sm90.backward.spec import Spec  # noqa: E402
from fa4core.sm90.backward.tuning import SHAPES, Shape  # noqa: E402
from primitives import score  # noqa: E402

PLAIN = Rule.of(Variant().program).dump()
DERIVED = Rule.of(Variant(score=score.softcap(20.0)).program).dump()

#: A key tile for each warpgroup, with a part of dV behind dS; one key tile for both; derivatives;
#: dQ by way of the reduce role.
SPECS = (
    *(Spec(PLAIN, "bfloat16", limit, limit, shape) for limit, _, shape in SHAPES),
    *(Spec(DERIVED, "bfloat16", limit, limit, shape) for limit, shape, _ in SHAPES),
    *(
        Spec(PLAIN, "bfloat16", limit, limit, shape, deterministic=True)
        for limit, _, shape in SHAPES[1:]
    ),
    *(Spec(PLAIN, "bfloat16", 128, 128, Shape(64, held=True, direct=way)) for way in (False, True)),
    *(Spec(PLAIN, "bfloat16", 128, 128, Shape(64, stages=3, direct=way)) for way in (False, True)),
    Spec(PLAIN, "bfloat16", 64, 64, Shape(128, stages=3, early=32, direct=False)),
)
THREE = Shape(64, 3, stages=3, passes=2, early=32, direct=False, consumer=160, producer=32)
OTHERS = (
    Spec(PLAIN, "bfloat16", 64, 64, Shape(64, groups=1)),
    Spec(PLAIN, "bfloat16", 192, 128, Shape(64, shared=True, stages_out=1)),
    Spec(PLAIN, "bfloat16", 64, 64, THREE),
    Spec(PLAIN, "bfloat16", 64, 64, Shape(64, groups=1, held=True)),
    Spec(DERIVED, "bfloat16", 64, 64, Shape(128)),
)


def named(spec: Spec) -> str:
    kind = "derived" if spec.differentiates else "plain"
    return f"{spec.shape} {kind}{' in order' * spec.deterministic}"


#: Each role's code, with specs that run it.
CODE = {
    (role, function): [spec for spec in (*SPECS, *OTHERS) if function is roles_of(spec)[role][0]]
    for one in SPECS
    for role, (function, _) in roles_of(one).items()
}
SEEDED = [(bug, specs) for (role, code), specs in CODE.items() for bug in bugs(role, code)]


@pytest.mark.parametrize("spec", SPECS, ids=named)
def test_the_protocol_is_safe(spec: Spec) -> None:
    """With empty work tiles first, last and in between."""
    for blocks in ((3, 0, 2), (0, 0, 1), (1, 2, 0)):
        check_backward(spec, blocks)


@pytest.mark.sweep
@pytest.mark.parametrize("spec", [*SPECS, *OTHERS], ids=named)
def test_every_short_list_of_tiles_is_safe(spec: Spec) -> None:
    """All lists of three work tiles with up to five query tiles, one CTA working through them."""
    for blocks in itertools.product(range(6), repeat=3):
        check_backward(spec, blocks)


@pytest.mark.parametrize(("bug", "specs"), SEEDED, ids=[str(bug) for bug, _ in SEEDED])
def test_a_seeded_bug_is_found(bug, specs: list[Spec]) -> None:
    """Deadlock, race, missed phase or too many arrivals; the counterexample names a role."""
    with pytest.raises(ProtocolError) as found:
        for blocks, spec in itertools.product(((4, 0, 2), (1, 5, 3)), specs):
            check_backward(spec, blocks, {bug.role: bug.function})
    assert any(role in str(found.value) for role, _ in CODE)


def test_there_are_enough_seeded_bugs() -> None:
    assert len(SEEDED) >= 50
