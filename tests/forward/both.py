"""Cases for the forward kernels of both targets, each in the emulator of its own machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from sm90 import hopper
from sm100 import emulated

EXECUTE = {"sm100": emulated.execute, "sm90": hopper.execute}


def execute(target: str, *case: Any, **options: Any) -> None:
    """Compare output, LSE and row maximum with the oracle; arguments are `emulated.execute`'s."""
    EXECUTE[target](*case, **options)


def on_both(names: str = "", values: Sequence = (), **by_default: Any) -> Any:
    """Parametrises a test by target, and by values; what is not named by default is swept.

    Args:
        names: Of parameters, as of pytest.
        values: Of those.
        by_default: By target: values, or whether the test runs where there are none. All, if not
            given.
    """
    found = []
    for target in EXECUTE:
        for value in values or (None,):
            wanted = by_default.get(target, True)
            chosen = wanted if isinstance(wanted, bool) else value in wanted
            given = () if value is None else value if isinstance(value, tuple) else (value,)
            name = "-".join(map(str, (target, *given)))
            marks = () if chosen else (pytest.mark.sweep,)
            found.append(pytest.param(target, *given, marks=marks, id=name))
    return pytest.mark.parametrize(f"target, {names}" if names else "target", found)
