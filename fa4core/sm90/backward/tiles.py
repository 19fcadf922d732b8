"""A consumer warpgroup's tiles in shared memory that are no operands, and dK's and dV's way out."""

from __future__ import annotations

from typing import Any

import attrs
from cutlass import cute

from fa4core.pipeline.effects import Fixed
from fa4core.sm90.backward.spec import ROWS, Spec
from fa4core.sm90.boxes import box
from fa4core.sm90.memory import partition, store


@attrs.frozen(eq=False)
class Result(Fixed):
    """dK or dV.

    Attributes:
        spec: Of the kernel.
        name: "k" or "v".
        shared: (64, columns, groups).
        atom, out: TMA's store of a box and its view of the tensor.
    """

    spec: Spec
    name: str
    shared: cute.Tensor
    atom: cute.CopyAtom
    out: cute.Tensor

    def tile(self, t: Any) -> cute.Tensor:
        return self.shared[(None, None, t)]

    def store(self, t: Any, item: Any, thread: Any) -> None:
        """Begin to store a warpgroup's part, by its first warp; no box outside the tensor."""
        columns, part = self.spec.stored[self.name]
        shape = ROWS, box(part)
        row = (item.tile * self.spec.tiles + self.spec.tile_of(t)) * ROWS
        for i in range(part // shape[1]):
            column = self.spec.part_of(t) * part + i * shape[1]
            shared = cute.local_tile(self.shared, shape, (0, i, None))
            of, to = partition(
                self.atom, shared, self.out, shape, 0,
                row, item.seqlen_k, item.start_k, item.h_kv, item.b_k, column,
            )  # fmt: skip
            store(self.atom, of[(None, t)], to, thread, (row < item.seqlen_k) & (column < columns))


class Tiles(Fixed):
    """See the module.

    Args:
        spec: Of the kernel.
        thread: 0..127 within the warpgroup.
        rows: "lse", "delta" to (queries, stages).
        weights: (64, queries, tiles, stages), if P goes through shared memory.
        grad_s: Likewise.
        grad_q: (numbers of a part, groups), float32.
        sums: Padded dQ in global memory, (heads, rows, d); how tiles lie in it says `RowSpec.part`.
        results: "k", "v" to dK, dV.
    """

    def __init__(
        self, spec: Spec, thread, rows: dict, weights, grad_s, grad_q, sums, results: dict
    ):
        self.spec, self.thread, self.rows, self.sums = spec, thread, rows, sums
        self._weights, self._grad_s, self._grad_q = weights, grad_s, grad_q
        self.results: dict[str, Result] = results

    def lse(self, t: Any, stage: Any) -> cute.Tensor:
        """(2, pairs) of the thread's queries."""
        return self._of_thread("lse", t, stage)

    def delta(self, t: Any, stage: Any) -> cute.Tensor:
        return self._of_thread("delta", t, stage)

    def _of_thread(self, name: str, t: Any, stage: Any) -> cute.Tensor:
        rows, parts = self.rows[name], self.spec.parts
        pairs = self.spec.queries // 8
        shape = (2, 4, pairs // parts, parts, rows.shape[1])
        stride = (1, 2, 8, 8 * pairs // parts, rows.stride[1])
        view = cute.make_tensor(rows.iterator, cute.make_layout(shape, stride=stride))
        return view[(None, self.thread % 4, None, self.spec.part_of(t), stage)]

    def weights(self, t: Any, stage: Any) -> cute.Tensor:
        """The warpgroup's part of P."""
        return self._part(self._weights, t, stage)

    def grad_s(self, t: Any, stage: Any) -> cute.Tensor:
        """The warpgroup's part of dS."""
        return self._part(self._grad_s, t, stage)

    def _part(self, tiles: cute.Tensor, t: Any, stage: Any) -> cute.Tensor:
        tile = tiles[(None, None, self.spec.tile_of(t), stage)]
        shape = (ROWS, self.spec.queries // self.spec.parts)
        return cute.local_tile(tile, shape, (0, self.spec.part_of(t)))

    def grad_q(self, t: Any) -> cute.Tensor:
        """The warpgroup's part of dQ."""
        return self._grad_q[(None, t)]

    def sums_of(self, t: Any, item: Any, head: Any, j: Any, part: int) -> cute.Pointer:
        """The place of a warpgroup's part of query tile `j` in global memory."""
        return place_of(self.spec, self.sums, t, item, head, j, part)


def place_of(
    spec: Spec, sums: cute.Tensor, t: Any, item: Any, head: Any, j: Any, part: int
) -> cute.Pointer:
    """See `Tiles.sums_of`."""
    row = item.rows_q + j * spec.queries
    number = t * spec.shape.passes + part
    return sums[(item.h + head, row, None)].iterator + number * (ROWS * spec.grad_q_columns)
