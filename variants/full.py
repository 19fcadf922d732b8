"""Full attention: every query attends to every key (Vaswani et al., arXiv:1706.03762)."""

from __future__ import annotations

from fa4core import Variant


def full() -> Variant:
    """Plain attention, no mask."""
    return Variant()
