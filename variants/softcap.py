"""Soft-capped scores: `cap * tanh(score / cap)` (Gemma 2, arXiv:2408.00118, section 2)."""

from __future__ import annotations

from fa4core import Variant, draw
from primitives import mask, score


def softcap(cap: float = 50.0, window: int | None = None) -> Variant:
    """Causal attention with scores kept inside (-cap, cap).

    Args:
        cap: Gemma 2 takes 50 in attention.
        window: Keys before the query in the local layers, 4095 in Gemma 2, whose window of 4096
            counts the query; None for the global layers.
    """
    return Variant(
        mask=mask.causal() if window is None else mask.sliding_window(window),
        score=score.softcap(cap),
    )


def main() -> None:
    """Draw it to `softcap.png`."""
    draw.variant(softcap(cap=50.0, window=1000), "softcap.png", seqlen=4096)


if __name__ == "__main__":
    main()
