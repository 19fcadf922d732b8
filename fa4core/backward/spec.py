"""What backward kernels are compiled for, on whichever target: the main one and those around it."""

from __future__ import annotations

import attrs

from fa4core.spec import KernelSpec


@attrs.frozen(slots=False)
class BackwardSpec(KernelSpec):
    """A backward kernel. A target's `Spec` has `queries` and `keys`, the sizes of its tiles, too.

    Attributes:
        graph: Mask, score mod and its derivatives (`Rule.dump`).
        deterministic: Whether shares of dQ are added in a fixed order.
        negative_scale: Whether the run-time scale may be below `LEAST_SCALE`: what is masked must
            then be scaled before it becomes an exponent.
        ctas: CTAs that share a work tile, each with key tiles of its own.
    """

    deterministic: bool = attrs.field(default=False, kw_only=True)
    negative_scale: bool = attrs.field(default=False, kw_only=True)
    ctas: int = attrs.field(default=1, kw_only=True)

    title = "backward"
    listed = False  # whether the kernel goes by lists of work tiles, one for each CTA
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
    def launches(self) -> tuple[BackwardSpec, ...]:
        """What the main kernel is compiled and launched for, one after the other, on the same
        tables: each computes some of the gradients."""
        return (self,)

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        raise NotImplementedError

    @property
    def sums_part(self) -> int:
        """How a query tile of dQ lies while it is summed up; see `RowSpec.part`."""
        return 0

    @property
    def keys(self) -> int:
        """Keys of a tile."""
        raise NotImplementedError


@attrs.frozen
class RowSpec:
    """A kernel before or after the main one.

    Attributes:
        queries: Of a tile.
        columns: Of the rows: the head dim of the output before, of the queries after.
        d: Head dim of the main kernel's tiles.
        grad_lse: Whether there is a gradient of the LSE.
        part: 0 if sums of dQ are row-major. Else a tile of them is made of parts of 64 rows and
            this many columns, each in the order in which a warpgroup's threads hold it: 4 numbers
            of each thread, then the next 4.
    """

    queries: int
    columns: int
    d: int
    grad_lse: bool = False
    part: int = 0

    def __str__(self) -> str:
        """A part of the kernel's name."""
        lse, part = "_lse" if self.grad_lse else "", f"_{self.part}" if self.part else ""
        return f"{self.queries}_{self.columns}_{self.d}{lse}{part}"
