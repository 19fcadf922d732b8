"""TMA's copies of one tile, out of views of global memory and into them."""

from __future__ import annotations

from typing import Any

import attrs
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from fa4core.lowering.cute import select


@attrs.frozen(eq=False)
class Operand:
    """What is copied by one atom.

    Attributes:
        made: Copy atom and view of global memory, as `make_tiled_tma_atom` gives them.
        shared: In shared memory; the modes of a tile, then the copy and the stage.
    """

    made: tuple[cute.CopyAtom, cute.Tensor]
    shared: cute.Tensor

    @property
    def atom(self) -> cute.CopyAtom:
        return self.made[0]

    @property
    def view(self) -> cute.Tensor:
        return self.made[1]

    def parts(self, there: cute.Tensor, first: tuple, shape: tuple) -> tuple[Any, Any]:
        """A tile that begins at `first` of a slice of the view: in shared and in global memory."""
        tile = cute.local_tile(cute.domain_offset(first, there), shape, (0,) * len(shape))
        return cpasync.tma_partition(
            self.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(self.shared, 0, len(shape)),
            cute.group_modes(tile, 0, len(shape)),
        )

    def load(
        self, there: cute.Tensor, first: tuple, shape: tuple, place: tuple, barrier: Any
    ) -> None:
        """Bring a tile to `place` (copy, stage); reports to `barrier`."""
        to, of = self.parts(there, first, shape)
        cute.copy(self.atom, of, to[(None, *place)], tma_bar_ptr=barrier)

    def store(self, there: cute.Tensor, first: tuple, shape: tuple, place: tuple) -> None:
        """Bring a tile from `place` to global memory, or add it there; opens no group."""
        of, to = self.parts(there, first, shape)
        cute.copy(self.atom, of[(None, *place)], to)

    def rows(self, b: Any, h: Any, start: Any, length: Any, first: Any) -> tuple[Any, Any]:
        """A slice of a view of sequences (`forward.views.keys`), and where row `first` is in it."""
        # an expanded dimension has one entry
        h, b = _within(h, self.view.shape[2]), _within(b, self.view.shape[3])
        return self.view[(None, None, h, b, start + length)], self.view.shape[0] - length + first


def _within(index: Any, extent: Any) -> Any:
    return select(index < extent, index, extent - 1, "int")
