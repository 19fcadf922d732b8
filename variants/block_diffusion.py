"""Block diffusion, training mask: noised tokens, then the same tokens clean (arXiv:2503.09573).

BD3-LM denoises a block of tokens at a time, given the clean blocks before it. One pass over
[noised, clean] trains every block at once; section 3 and figure 3 of the paper show the mask.
"""

from __future__ import annotations

from fa4core import Variant, draw
from primitives import mask


def block_diffusion(block: int = 32) -> Variant:
    """A sequence of 2n tokens, n noised and n clean.

    Args:
        block: Tokens that are denoised together.
    """
    return Variant(mask=mask.block_diffusion(block))


def main() -> None:
    """Draw it to `block_diffusion.png`."""
    draw.variant(block_diffusion(block=200), "block_diffusion.png", seqlen=4096)


if __name__ == "__main__":
    main()
