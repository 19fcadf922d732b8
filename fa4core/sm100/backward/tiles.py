"""How a Blackwell backward kernel is cut: what its launches compute, in which tiles.

Plain values: nothing here imports the DSL. `tuning` says why, `spec` what of it lies where.
"""

from __future__ import annotations

import attrs

from fa4core.backward.spec import BackwardSpec
from fa4core.pipeline.declare import WARP, Limits
from fa4core.sm100.backward.tuning import LANES, NARROW, Launch, Share, groups, transposed
from fa4core.sm100.spec import InTensorMemory

TILE = 128  # keys of a work tile
HALVES = 2  # of a block's queries: one for each copy of the compute role


@attrs.frozen(slots=False)
class Tiles(InTensorMemory, BackwardSpec):
    """A Blackwell backward kernel, but for its memory.

    Attributes:
        derivative: Whether d value / d score is anything but 1, or captured tensors have gradients:
            raw scores are then kept until dP is there.
        launch: Which gradients it computes.
    """

    derivative: bool = attrs.field(default=False, kw_only=True)
    launch: Launch = attrs.field(default="all", kw_only=True)
    target: str = attrs.field(default="sm100", kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.pair and self.wide:
            raise ValueError(f"head dims {self.head_dim}, {self.head_dim_v}: one CTA is possible")

    @property
    def keys(self) -> int:
        return TILE

    @property
    def wide(self) -> bool:
        """Whether dQ is computed transposed, for tiles of 64 queries."""
        return max(self.head_dim, self.head_dim_v) > NARROW

    @property
    def queries(self) -> int:
        return 64 if self.wide else 128

    @property
    def half(self) -> int:
        """Queries of a copy of the compute role."""
        return self.queries // HALVES

    @property
    def d(self) -> int:
        """Head dim of the tiles: every CTA has a multiple of 16 of an operand's columns; a
        transposed dQ takes whole groups of 128 of them, which begin at panels of 64."""
        if self.wide:
            return max(LANES, _up(self.head_dim, 64))
        return _up(self.head_dim, 16 * self.ctas)

    @property
    def d_v(self) -> int:
        return _up(self.head_dim_v, 16 * self.ctas)

    @property
    def launches(self) -> tuple[Tiles, ...]:
        if self.launch != "all" or self._columns_of_all <= Limits().tmem_columns:
            return (self,)
        only_v = attrs.evolve(self, launch="dv", derivative=False)
        return only_v, attrs.evolve(self, launch="dk")

    @property
    def with_v(self) -> bool:
        """Whether dV is computed."""
        return self.launch != "dk"

    @property
    def with_k(self) -> bool:
        """Whether dK and dQ are computed."""
        return self.launch != "dv"

    @property
    def pair(self) -> bool:
        """Whether two CTAs share a work tile."""
        return self.ctas == 2

    @property
    def rows(self) -> int:
        """Queries of a block that a CTA has of operand B of S and dP, and of dQ."""
        return self.queries // self.ctas

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of the reduce role, which takes a row of dQ at once; of the compute role; of others."""
        if self.derivative:
            if self.pair:
                return 72, 192, 56
            return (88, 168, 88) if self.wide else (64, 200, 48)
        return (152, 136, 88) if self.ctas == 1 else (136, 136, 104)

    @property
    def dq_groups(self) -> tuple[int, ...]:
        """Where the columns of the head dim begin that each product for dQ gives."""
        return groups(self.d) if self.wide else (0,)

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that a thread of the reduce role has: of its query, a pair's two threads
        share a row; transposed, queries of each group."""
        return len(self.dq_groups) * self.queries if self.wide else self.d // self.ctas

    @property
    def _columns_of_all(self) -> int:
        """Of tensor memory, if dQ has none of its own."""
        return self.d + self.d_v + self.queries + max(self.queries, self.dq_columns)

    @property
    def added(self) -> int:
        """Columns of dQ staged at a time: rows of 128 bytes, or of 64. A pair's must end where
        those of the row's other thread begin; else TMA clips what is behind the last column."""
        return 32 if self.ctas == 1 or self.dq_columns % 32 == 0 else 16

    @property
    def shares(self) -> tuple[Share, ...]:
        """dQ of a block as it is added, in the order of its columns in tensor memory."""
        if self.wide:
            return transposed(self.d, self.queries)
        firsts = range(0, self.dq_columns, self.added)
        return tuple(Share(min(self.added, self.dq_columns - n), 0, n) for n in firsts)

    @property
    def warps_down(self) -> int:
        """Warps of the reduce role that have rows of dQ one below the other."""
        return 1 if self.wide else self.rows // WARP

    @property
    def columns_apart(self) -> int:
        """From one warp beside another to the next."""
        return WARP if self.wide else self.dq_columns

    @property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Shares of dQ that a thread of the reduce role holds at once, by number."""
        parts, most = range(len(self.shares)), 1 if self.derivative else 4
        return tuple(tuple(parts[i : i + most]) for i in parts[::most])

    @property
    def dq_inside(self) -> str | None:
        """The region of tensor memory where dQ lies; None: it has columns of its own."""
        grads = self.d_v * self.with_v + self.d
        if 2 * self.queries + grads + self.dq_columns <= Limits().tmem_columns:
            return None
        return "grads" if self.ctas == 1 else "scores"


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
