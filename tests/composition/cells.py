"""Runs a cell of the composition table; nothing in it is specific to a primitive.

A cell runs the kernel in the emulator with every detector on, and compares output, LSE and row
maximum with the float64 oracle.
"""

from __future__ import annotations

from typing import Literal

import attrs
from features import Feature, case_of, together

from fa4core.emulator.session import emulator
from fa4core.testing import assert_close_to_oracle, by_backend, default_exp, run

Outcome = Literal["runs", "alternatives", "refused"]


@attrs.frozen
class Cell:
    """What came of two features together; `why` says why it was refused."""

    outcome: Outcome
    why: str = ""


def execute(a: Feature, b: Feature, target: str = "sm100", seed: int = 0) -> Cell:
    """Run two features together.

    Raises:
        AssertionError: The result is wrong, or a detector of the emulator fired.
    """
    slots = together(a, b)
    if slots is None:
        return Cell("alternatives")
    case = case_of(slots, seed)
    inputs = case.inputs()
    try:
        with emulator(target=target, seed=seed, detect="all", num_sms=3, record=False):
            results = run(by_backend("emulator"), inputs, backward=False)
            exp = default_exp("emulator", inputs)
    except (ValueError, NotImplementedError) as error:
        return Cell("refused", str(error))
    assert_close_to_oracle(results, inputs, context=str(case), exp=exp)
    return Cell("runs")
