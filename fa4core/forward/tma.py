"""TMA's copies of one tile, out of views of global memory (`views`) and into them."""

from __future__ import annotations

from typing import Any

import attrs
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from fa4core.forward.panels import box, swizzled
from fa4core.lowering.cute import inside


def copies(
    op: Any, view: cute.Tensor, rows: tuple[int, ...], columns: int, height: int
) -> tuple[cute.CopyAtom, cute.Tensor]:
    """TMA's copy of a box of panels (`panels.box`), and its view of a tensor."""
    layout = swizzled(box(rows, columns, height), columns, view.element_type)
    atom, there = cpasync.make_tiled_tma_atom(op, view, layout, (*rows, columns))
    return atom, there


@attrs.frozen(eq=False)
class Operand:
    """What is copied by one atom.

    Attributes:
        atom: Copy atom, and `view` of global memory, both as `make_tiled_tma_atom` gives them.
        shared: In shared memory; the modes of a tile, then the copy and the stage.
    """

    atom: cute.CopyAtom
    view: cute.Tensor
    shared: cute.Tensor

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
        """A slice of a view of sequences (`views.keys`), and where row `first` is in it."""
        h, b = inside(h, self.view.shape[2]), inside(b, self.view.shape[3])
        return self.rows_of(b, h, start, length, first)

    def rows_of(self, b: Any, h: Any, start: Any, length: Any, first: Any) -> tuple[Any, Any]:
        """As `rows`, of a tensor that is never expanded."""
        return self.view[(None, None, h, b, start + length)], self.view.shape[0] - length + first
