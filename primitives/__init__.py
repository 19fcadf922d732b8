"""What a variant is made of: frozen values and traced functions.

`mask`, `score`, `sink`, `sparsity`, `exp`, `schedule` and `sequence` are orthogonal: any value of
one works with any value of another. This package knows torch; it knows nothing of kernels.
"""

from primitives import exp, mask, schedule, score, sequence, sink, sparsity
from primitives.expr.errors import DefinitionError
from primitives.scalar import parameter

__all__ = [
    "DefinitionError",
    "exp",
    "mask",
    "parameter",
    "schedule",
    "score",
    "sequence",
    "sink",
    "sparsity",
]
