"""`ForwardSpec`: what every forward kernel is compiled for, on whichever target."""

from __future__ import annotations

import math

import attrs

from fa4core.spec import KernelSpec


@attrs.frozen(slots=False)
class ForwardSpec(KernelSpec):
    """A forward kernel.

    Attributes:
        graph: Mask, score mod and sink (`VariantGraph.dump`).
        threshold: Growth of a row's maximum, log2 domain, that is left unapplied.
        packed: Query heads packed into the rows of a tile, a divisor of the group; 1: none.
        page_rows: Keys that one copy brings out of a page, `gcd(page size, block)`; 0: no pages.
        split: Whether keys are split: results are then float32 and of one share each, in a batch
            entry of its own behind those of the shares before it.
    """

    threshold: float = attrs.field(default=8.0, kw_only=True)
    packed: int = attrs.field(default=1, kw_only=True)
    page_rows: int = attrs.field(default=0, kw_only=True)
    split: bool = attrs.field(default=False, kw_only=True)

    title = "forward"

    @property
    def tile(self) -> int:
        """Rows of a query tile."""
        raise NotImplementedError

    @property
    def block(self) -> int:
        """Keys of a block."""
        raise NotImplementedError

    @property
    def queries(self) -> int:
        """Of a tile."""
        return self.tile // self.packed

    @property
    def rows(self) -> int:
        """Of a tile that are in use."""
        return self.queries * self.packed

    @property
    def q_rows(self) -> tuple[int, int]:
        """The rows of a query tile: heads, which are fastest, and queries."""
        return self.packed, self.queries

    @property
    def key_rows(self) -> int:
        """Keys that one copy brings."""
        return self.page_rows or self.block

    @property
    def far(self) -> float:
        """Scores, log2 domain, from which on float32 is too coarse for a weight's exponent.

        Rounding a smaller one takes up to far / 2^25 of it, and the largest weight, 2^threshold,
        must stay finite when that much is added to its exponent.
        """
        room = 15.9 if self.dtype == "float16" else 96.0
        return 2.0 ** (25 + min(4, math.floor(math.log2(room - self.threshold))))
