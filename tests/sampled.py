"""Cases of which the default run takes a part; the sweep takes all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_of(every: int, cases: Iterable[Any]) -> list[Any]:
    """Parameters of which the first, and every so many, run by default."""
    return [case if i % every == 0 else _in_sweep(case) for i, case in enumerate(cases)]


def _in_sweep(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.sweep)
