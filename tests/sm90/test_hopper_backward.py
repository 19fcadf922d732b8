"""The Hopper backward's own choices: shapes besides the tuned ones, and what ptxas makes of it.

What every target's backward must get right is in `tests/backward`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from sampled import one_of

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import emulated_backward

from fa4core import Variant
from fa4core.backward.launch import launches
from fa4core.compile.artifact import Artifact
from fa4core.compile.cache import obtain
from fa4core.compile.targets import resolve
from fa4core.places import in_emulator
from fa4core.plan.problem import Problem
from fa4core.reference.tiled import Call
from fa4core.sm90.backward.launch import BACKWARD, shaped
from fa4core.sm90.backward.tuning import Shape as Cut
from fa4core.testing import Shape
from primitives import mask, score

CUTS = (
    Cut(64, groups=1),
    Cut(128, early=16),
    Cut(64, groups=2, stages=3, passes=2, early=32),
    Cut(64, held=True),
    Cut(128, held=True, direct=False),
    Cut(64, shared=True, stages_out=1),
)


@pytest.mark.parametrize(
    "cut", [CUTS[0], *(pytest.param(cut, marks=pytest.mark.sweep) for cut in CUTS[1:])], ids=str
)
def test_other_shapes_of_tiles(cut: Cut, monkeypatch) -> None:
    monkeypatch.setitem(emulated_backward.BACKWARD, "sm90", shaped(cut))
    shape = Shape((140,), (200,), 2, 1, 64, 48)
    emulated_backward.execute("sm90", "Variant(mask=mask.causal())", shape, seed=1)


@pytest.mark.parametrize(
    "cut",
    [
        Cut(128, groups=3),
        Cut(64, early=80),
        Cut(64, shared=True, early=8),
        Cut(64, shared=True, held=True),
    ],
)
def test_shapes_that_cannot_be_are_refused(cut: Cut) -> None:
    with pytest.raises(ValueError, match=r"queries|early|held"):
        _kernel(Variant(), 64, shaped(cut))


@pytest.mark.parametrize("name, d", one_of(3, itertools.product(("causal", "softcap"), (64, 128))))
def test_nothing_spills_and_products_are_asynchronous(name: str, d: int) -> None:
    """With too few registers ptxas waits for each product by itself; there are 40 to 80."""
    variant = Variant(
        mask=mask.causal(), score=score.softcap(20.0) if name == "softcap" else score.identity()
    )
    package = obtain(_kernel(variant, d, BACKWARD))
    artifact = Artifact(resolve("sm90"), "backward", package.ptx, package.cubin)
    (found,) = artifact.sass_statistics().values()
    counts = Counter(found.instructions)
    assert not counts["LDL"] and not counts["STL"]
    assert counts["WARPGROUP"] < counts["HGMMA"] / 2  # fences and waits


def _kernel(variant: Variant, d: int, skeleton):
    problem = Problem(1, 2, 2, d, d, (256,), (256,))
    call = Call(variant.program, problem, None, None, 1 / math.sqrt(d))
    found = launches(skeleton, call, in_emulator("sm90"), False, False)
    return found.kernels[1]
