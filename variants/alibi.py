"""ALiBi: a penalty linear in the distance, one slope per head (Press et al., arXiv:2108.12409)."""

from __future__ import annotations

import torch

from fa4core import Variant, draw
from primitives import mask, score


def alibi(slopes: torch.Tensor | None = None, *, heads: int = 8) -> Variant:
    """Causal attention with ALiBi.

    Args:
        slopes: float (heads_q,), receives a gradient if it requires one. Left out: the paper's
            geometric sequence.
        heads: Query heads, if `slopes` is left out.
    """
    return Variant(
        mask=mask.causal(),
        score=score.alibi(heads if slopes is None else slopes),
    )


def main() -> None:
    """Draw it to `alibi.png`."""
    draw.variant(alibi(heads=8), "alibi.png", seqlen=2048, heads=8)


if __name__ == "__main__":
    main()
