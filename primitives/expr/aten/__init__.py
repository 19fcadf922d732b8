"""ATen operators as rules on `Array`s: the vocabulary a traced function may use.

`RULES[name](out, *args, **kwargs)` handles one operator, where `out` is its result's shape and
dtype. `rules` holds the table; the other files fill it. `recorded` applies it.
"""

from primitives.expr.aten import gradients, pointwise, reductions, shapes  # noqa: F401
from primitives.expr.aten.rules import RULES, Result

__all__ = ["RULES", "Result"]
