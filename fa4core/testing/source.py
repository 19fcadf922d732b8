"""Descriptions of variants as Python source: what strategies draw and failing examples print.

A variant holds tensors and traced graphs, which neither shrink nor print well. So the strategies
draw source text, such as `mask.causal() & mask.sliding_window(3)`, and `build` makes the value of
it. Text is frozen, has equality, and can be pasted into a session after
`from fa4core.testing.source import *`. Knows the primitives' public names and `Variant`.
"""

from __future__ import annotations

from typing import Any

import torch

from fa4core.variant import Variant
from primitives import exp, mask, parameter, schedule, score, sink, sparsity

__all__ = [
    "Variant",
    "bits",
    "build",
    "exp",
    "integers",
    "mask",
    "normal",
    "parameter",
    "schedule",
    "score",
    "sink",
    "sparsity",
    "torch",
]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integers(seed: int, *shape: int, low: int = 0, high: int) -> torch.Tensor:
    """An int32 table of numbers from `low` to `high - 1`, the same for the same seed."""
    return torch.randint(low, high, shape, generator=_generator(seed)).int()


def bits(seed: int, *shape: int, density: float = 0.5) -> torch.Tensor:
    """A bool table, true with probability `density`."""
    return torch.rand(shape, generator=_generator(seed)) < density


def normal(seed: int, *shape: int, grad: bool = True, std: float = 1.0) -> torch.Tensor:
    """A float32 table of normal numbers, a leaf that requires grad unless `grad` is false."""
    return (torch.randn(shape, generator=_generator(seed)) * std).requires_grad_(grad)


def build(source: str) -> Any:
    """The value that `source` describes, with tensors and functions of its own.

    Masks, score mods and sinks are given the text as their name, so that their `repr` shows it.

    Args:
        source: An expression over the names of this module.

    Raises:
        SyntaxError, NameError, ...: What evaluating the text raises.
    """
    import attrs

    value = eval(source, {name: globals()[name] for name in __all__})
    if isinstance(value, mask.Mask | score.ScoreMod | sink.Sink):
        return attrs.evolve(value, name=source)
    return value
