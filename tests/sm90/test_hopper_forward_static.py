"""Machine code of Hopper forward kernels: nothing spills, and products run beside other work."""

from __future__ import annotations

import math
from collections import Counter

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from fa4core import Variant
from fa4core.compile.artifact import Artifact
from fa4core.compile.build import build
from fa4core.compile.targets import resolve
from fa4core.dispatch import analysed
from fa4core.places import in_emulator
from fa4core.plan.problem import Problem
from fa4core.prepared import kernel_of
from fa4core.sm90.forward.launch import shaped, spec_of
from primitives import mask


@pytest.mark.parametrize("d", [64, 128])
def test_nothing_spills_and_products_are_asynchronous(d: int) -> None:
    """Where ptxas can't follow what is in flight, it waits for each product by itself."""
    problem = Problem(1, 2, 2, d, d, (512,), (512,))
    program = Variant(mask=mask.causal()).program
    call = analysed(program, problem, None, 1 / math.sqrt(d))
    skeleton = shaped(spec_of(call, "sm90").shape, row_max=False)
    kernel, _ = kernel_of(skeleton, call, in_emulator("sm90"))
    assert kernel is not None
    package = build(kernel)
    artifact = Artifact(resolve("sm90"), "forward", package.ptx, package.cubin)
    (found,) = artifact.sass_statistics().values()
    counts = Counter(found.instructions)
    assert not counts["LDL"] and not counts["STL"]
    assert counts["WARPGROUP"] < counts["HGMMA"] / 2  # fences and waits
