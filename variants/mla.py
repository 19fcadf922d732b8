"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), training and prefill.

Its scores are plain causal attention; what is special is the shape: 128 dimensions without
position plus 64 rotary ones make a query and a key of 192, a value has 128.
"""

from __future__ import annotations

from fa4core import Variant, draw
from primitives import mask

HEAD_DIM = 192
HEAD_DIM_V = 128


def mla() -> Variant:
    """Causal attention; call it with q, k of head dim 192 and v of 128."""
    return Variant(mask=mask.causal())


def main() -> None:
    """Draw it to `mla.png`."""
    title = "mla: causal, head dims 192 and 128"
    draw.variant(mla(), "mla.png", seqlen=4096, title=title)


if __name__ == "__main__":
    main()
