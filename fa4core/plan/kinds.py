"""The kinds of a tile."""

#: No element attends, some may, all do. EMPTY and FULL are proofs, PARTIAL says nothing.
EMPTY, PARTIAL, FULL = 0, 1, 2
