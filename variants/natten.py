"""Neighbourhood attention on an image (NATTEN: arXiv:2204.07143; dilated, arXiv:2209.15001).

Tokens are the pixels of a canvas in row-major order; a query attends to the `kernel` x `kernel`
pixels around it, shifted inwards at the edges. `primitives.mask.natten` has one and three
dimensions, strides, and causal axes too.
"""

from __future__ import annotations

from fa4core import Variant, draw
from primitives import mask


def natten(height: int = 32, width: int = 32, kernel: int = 9, dilation: int = 1) -> Variant:
    """Two-dimensional neighbourhood attention over height * width tokens.

    Args:
        height: Rows of the canvas.
        width: Columns of the canvas.
        kernel: Edge of the neighbourhood, in pixels.
        dilation: Distance of neighbours, in pixels.
    """
    return Variant(mask=mask.natten((height, width), kernel, dilation))


def main() -> None:
    """Draw it to `natten.png`."""
    draw.variant(natten(height=48, width=48, kernel=9), "natten.png", seqlen=48 * 48)


if __name__ == "__main__":
    main()
