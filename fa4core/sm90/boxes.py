"""The boxes in which TMA copies a tile's columns. Plain values: nothing here imports the DSL."""

from __future__ import annotations


def box(columns: int) -> int:
    """Columns of a TMA box: of an atom of the widest swizzle whose atoms fit into so many."""
    return next(width for width in (64, 32, 16, 8) if columns % width == 0)


def inside_boxes(columns: int, piece: int) -> int:
    """Columns of the boxes that a tensor of so many columns has a part in. One that lies outside
    altogether ends in an illegal address on an H200 where memory before the tensor is unmapped."""
    return -(-columns // box(piece)) * box(piece)
