"""Masks: which keys a query attends to.

`define` makes one of a plain Python function; the rest are prebuilt. All are values of class
`Mask` and combine with `&`, `|`, `~`, `^`, `-`, `.shift` and `.restrict`.
"""

from primitives.mask.core import Mask, define, per_head, select
from primitives.mask.windows import causal, full, sink_tokens, sliding_window

__all__ = [
    "Mask",
    "causal",
    "define",
    "full",
    "per_head",
    "select",
    "sink_tokens",
    "sliding_window",
]
