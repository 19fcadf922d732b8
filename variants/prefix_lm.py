"""Prefix LM: bidirectional over a prefix, causal behind it (T5, arXiv:1910.10683, 3.2.1)."""

from __future__ import annotations

import torch

from fa4core import Variant, draw
from primitives import mask


def prefix_lm(prefix: int | torch.Tensor = 1024) -> Variant:
    """Everyone sees the prefix; behind it attention is causal.

    Args:
        prefix: Keys in the prefix; an int tensor of shape (batch,) gives each sequence its own.
    """
    return Variant(mask=mask.prefix_lm(prefix))


def main() -> None:
    """Draw it to `prefix_lm.png`."""
    draw.variant(prefix_lm(prefix=1000), "prefix_lm.png", seqlen=4096)


if __name__ == "__main__":
    main()
