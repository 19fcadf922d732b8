"""Causal attention: a query attends to itself and what came before (arXiv:1706.03762, 3.2.3)."""

from __future__ import annotations

from fa4core import Variant
from primitives import mask


def causal() -> Variant:
    """Causal attention, aligned bottom-right: the last query sees the last key."""
    return Variant(mask=mask.causal())
