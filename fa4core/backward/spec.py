"""`BackwardSpec`: what every backward kernel is compiled for, on whichever target."""

from __future__ import annotations

import attrs

from fa4core.spec import KernelSpec


@attrs.frozen(slots=False)
class BackwardSpec(KernelSpec):
    """A backward kernel. A target's `Spec` has `queries` and `keys`, the sizes of its tiles, too.

    Attributes:
        graph: Mask, score mod and its derivatives (`Rule.dump`).
        deterministic: Whether shares of dQ are added in a fixed order.
        negative_scale: Whether the run-time scale may be 0 or below: what is masked must then be
            scaled before it becomes an exponent.
        ctas: CTAs that share a work tile, each with key tiles of its own.
    """

    deterministic: bool = attrs.field(default=False, kw_only=True)
    negative_scale: bool = attrs.field(default=False, kw_only=True)
    ctas: int = attrs.field(default=1, kw_only=True)

    title = "backward"
    dynamic = False  # whether work tiles come from a queue

    @property
    def tiles(self) -> int:
        """Key tiles of a CTA, side by side."""
        return 1

    @property
    def side(self) -> int:
        """Key tiles of a work tile."""
        return self.tiles * self.ctas

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        raise NotImplementedError

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        raise NotImplementedError
