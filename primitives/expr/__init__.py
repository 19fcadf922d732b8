"""The expression graph: small, typed, canonical; the one form of every mask and score function.

`trace` makes it from plain Python, `algebra` composes it, `text` writes and reads it. What it
becomes (torch code, kernel code, interval bounds) is decided elsewhere, in `fa4core.lowering`.
"""

from primitives.expr.node import VARIABLES, Capture, Kind, Node, captures, walk
from primitives.expr.rebuild import fingerprint, substitute
from primitives.expr.text import dump, parse, pretty

__all__ = [
    "VARIABLES",
    "Capture",
    "Kind",
    "Node",
    "captures",
    "dump",
    "fingerprint",
    "parse",
    "pretty",
    "substitute",
    "walk",
]
