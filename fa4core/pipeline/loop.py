"""`range` for the loops of role code, with the hint that the DSL's preprocessor reads.

The preprocessor goes by the name, so role files import this one over the built-in. On the device
`unroll=1` keeps the compiler from repeating a loop's body (it takes a block of inline PTX for one
instruction, however long it is); in the checker the hint means nothing.
"""

from __future__ import annotations

import builtins


def range(*bounds: int, unroll: int = 0) -> builtins.range:
    """The built-in range; `unroll` is for the device: 1 forbids to."""
    return builtins.range(*bounds)
