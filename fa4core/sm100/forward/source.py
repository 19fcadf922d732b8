"""Work sources: how a role learns which work tile comes next.

Every role has an end of the source of its CTA and runs `first`, then `next` until it gets `count`
or more; all of them get the same numbers in the same order.
"""

from __future__ import annotations

from typing import Any

from fa4core.pipeline.effects import Fixed


class Stride(Fixed):
    """A list known at launch: `begin`, `begin + step`, ..."""

    def __init__(self, begin: Any, step: Any):
        self.begin, self.step = begin, step

    def first(self) -> Any:
        return self.begin

    def next(self, index: Any) -> Any:
        return index + self.step
