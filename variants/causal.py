"""Causal attention: a query attends to itself and what came before (arXiv:1706.03762, 3.2.3)."""

from __future__ import annotations

from fa4core import Variant, draw
from primitives import mask


def causal() -> Variant:
    """Causal attention, aligned bottom-right: the last query sees the last key."""
    return Variant(mask=mask.causal())


def main() -> None:
    """Draw it to `causal.png`."""
    draw.variant(causal(), "causal.png", seqlen=4096)


if __name__ == "__main__":
    main()
