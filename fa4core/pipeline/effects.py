"""What role code's work touches: declared on the very methods that do the work.

    @touches(lambda work, t, stage: (reads("q", t), writes("s", t)), unit="mma")
    def qk(self, t, stage): ...

On the device the decorator changes nothing. The checker reads the declaration and never calls the
method. It knows neither the DSL nor any kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import attrs

Unit = Literal["threads", "mma", "tma", "wgmma", "store"]


@attrs.frozen
class Access:
    """One access of a region's stage; of the other CTA's of a pair if it is the `peer`'s."""

    kind: Literal["read", "write"]
    region: str
    stage: int = 0
    peer: bool = False


def reads(region: str, stage: int = 0) -> Access:
    return Access("read", region, stage)


def writes(region: str, stage: int = 0, peer: bool = False) -> Access:
    return Access("write", region, stage, peer)


@attrs.frozen
class Effect:
    """How a method of a role's work behaves.

    Attributes:
        accesses: Its arguments (without self) to the accesses it makes.
        unit: Who makes them: the role's threads before the call returns; "mma", the tensor core in
            the order of issue; "tma", a bulk copy, which reports to the barrier in the argument
            `barrier`; or as one group of asynchronous operations "wgmma" (a warpgroup's products)
            or "store" (TMA on its way out), some time before the role drains them.
        drains: Whether the call waits for the unit's groups; its argument says how many may be
            left.
    """

    accesses: Callable[..., tuple[Access, ...]]
    unit: Unit = "threads"
    drains: bool = False


def touches(accesses: Callable[..., tuple[Access, ...]], unit: Unit = "threads") -> Callable:
    """Declare the effect of a method; see the module."""

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        method.effect = Effect(accesses, unit)  # type: ignore[attr-defined]
        return method

    return mark


def drains(unit: Unit) -> Callable:
    """Declare a method that waits until at most `left`, its argument, groups of a unit are left."""

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        method.effect = Effect(lambda left: (), unit, drains=True)  # type: ignore[attr-defined]
        return method

    return mark


class Fixed:
    """Base of objects that loops on the device carry without change (the DSL's value protocol)."""

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> Fixed:
        return self
