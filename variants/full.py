"""Full attention: every query attends to every key (Vaswani et al., arXiv:1706.03762)."""

from __future__ import annotations

from fa4core import Variant, draw


def full() -> Variant:
    """Plain attention, no mask."""
    return Variant()


def main() -> None:
    """Draw it to `full.png`."""
    draw.variant(full(), "full.png", seqlen=2048)


if __name__ == "__main__":
    main()
