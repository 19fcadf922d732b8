"""The checker on the forward's own role code: it is right, and every seeded bug in it is found."""

from __future__ import annotations

import itertools

import pytest
from seeded import bugs

from fa4core.compile import import_dsl

import_dsl()

from fa4core.pipeline.check import ProtocolError  # noqa: E402
from fa4core.sm100.forward.protocol import ROLES, check_forward, programs  # noqa: E402
from fa4core.sm100.forward.spec import Spec  # noqa: E402

SPEC = Spec("", "bfloat16", 128, 128)
SHORT_RING = Spec("", "bfloat16", 192, 128, tiles=1)  # K is given back at another place
SEEDED = [bug for role, (function, _) in ROLES.items() for bug in bugs(role, function)]
LISTS = ((3, 0, 2), (1, 1, 4), (2, 5, 1))


@pytest.mark.parametrize("tiles", [1, 2])
def test_every_short_list_of_tiles_is_safe(tiles: int) -> None:
    """All lists of three work tiles with up to six key blocks, one CTA working through them."""
    spec = Spec("", "bfloat16", 128, 128, tiles=tiles)
    most = 6 if tiles == 2 else 3
    for blocks in itertools.product(range(most + 1), repeat=3):
        check_forward(spec, blocks)


@pytest.mark.parametrize("d, d_v", [(8, 8), (64, 64), (64, 128), (128, 32)])
def test_other_head_dims_have_a_safe_pipeline(d: int, d_v: int) -> None:
    for blocks in LISTS:
        check_forward(Spec("", "float16", d, d_v), blocks)


@pytest.mark.parametrize("bug", SEEDED, ids=str)
def test_a_seeded_bug_is_found(bug) -> None:
    """Deadlock, race, missed phase or too many arrivals; the counterexample names a role."""
    with pytest.raises(ProtocolError) as found:
        for spec, blocks in itertools.product((SPEC, SHORT_RING), LISTS):
            check_forward(spec, blocks, {bug.role: bug.function})
    assert any(role in str(found.value) for role in ROLES)


def test_there_are_enough_seeded_bugs() -> None:
    assert len(SEEDED) >= 20


def test_events_come_from_the_role_code() -> None:
    recorded = {p.name: p for p in programs(SPEC, (2,))}
    assert set(recorded) == {"softmax0", "softmax1", "correction", "mma", "load", "store"}
    calls = [getattr(e, "name", None) for e in recorded["mma"].events]
    assert [c for c in calls if c] == [
        "qk", "qk",
        "pv", "pv_last", "qk", "pv", "pv_last", "qk",
        "pv", "pv_last", "pv", "pv_last",
    ]  # fmt: skip
