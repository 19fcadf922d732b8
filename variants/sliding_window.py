"""Causal attention in a sliding window (Longformer, arXiv:2004.05150; Mistral, arXiv:2310.06825).

Work grows with seqlen x window instead of seqlen^2. With sink tokens it is StreamingLLM's pattern
(arXiv:2309.17453): the first keys stay visible, which keeps generation stable.
"""

from __future__ import annotations

from fa4core import Variant, draw
from primitives import mask


def sliding_window(window: int = 1024, sink_tokens: int = 0) -> Variant:
    """A query attends to itself, `window` keys before it, and the first `sink_tokens` keys.

    Args:
        window: Keys before the query; Mistral's window of W tokens counts the query: W - 1 here.
        sink_tokens: Leading keys that stay visible.
    """
    inside = mask.sliding_window(window)
    if sink_tokens:
        inside = inside | (mask.sink_tokens(sink_tokens) & mask.causal())
    return Variant(mask=inside)


def main() -> None:
    """Draw it to `sliding_window.png`."""
    draw.variant(sliding_window(window=1024, sink_tokens=4), "sliding_window.png", seqlen=4096)


if __name__ == "__main__":
    main()
