"""A sliding window with learned sinks, as in gpt-oss (arXiv:2508.10925).

The sink is a logit per head in the softmax's denominator with no value of its own, so that a head
can attend to nothing. For sinks that are real tokens, see `variants.sliding_window`.
"""

from __future__ import annotations

import torch

from fa4core import Variant, draw
from primitives import mask
from primitives import sink as sinks


def sink(
    logits: torch.Tensor | None = None, *, window: int | None = 127, heads: int = 64
) -> Variant:
    """Causal attention in a window, with one learned sink per query head.

    Args:
        logits: float (heads_q,), receives a gradient if it requires one. Left out: zeros, which
            require one.
        window: Keys before the query; gpt-oss's window of 128 counts the query. None: no window,
            as in every second layer of gpt-oss.
        heads: Query heads, if `logits` is left out.
    """
    if logits is None:
        logits = torch.zeros(heads, requires_grad=True)
    return Variant(
        mask=mask.causal() if window is None else mask.sliding_window(window),
        sink=sinks.learned(logits),
    )


def main() -> None:
    """Draw it to `sink.png`."""
    title = "sink: a window of 128, and a learned sink"
    draw.variant(sink(window=127), "sink.png", seqlen=2048, heads=64, title=title)


if __name__ == "__main__":
    main()
