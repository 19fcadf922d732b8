"""Cases of which the default run takes a part; the sweep takes all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_of(every: int, cases: Iterable[Any]) -> list[Any]:
    """Parameters, tuples of them if there are several, of which the first, and every so many, run
    by default."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[pytest.mark.sweep] if i % every else [],
        )
        for i, case in enumerate(cases)
    ]
