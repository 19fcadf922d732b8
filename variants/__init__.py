"""Prebuilt variants, one short file each: a factory, its paper, and a picture.

`from variants import sliding_window` is the factory. `python -m variants.sliding_window` draws it,
and `python -m fa4core explain variants.sliding_window --window 1024` explains it. `variants.flex`
is a module: FlexAttention's own entry point.
"""

import warnings

from variants.alibi import alibi
from variants.block_diffusion import block_diffusion
from variants.block_sparse import block_sparse
from variants.causal import causal
from variants.document import document
from variants.full import full
from variants.mla import mla
from variants.natten import natten
from variants.prefix_lm import prefix_lm
from variants.sink import sink
from variants.sliding_window import sliding_window
from variants.softcap import softcap

# `python -m variants.NAME` imports this package, and with it NAME, before it runs NAME. runpy
# warns that this can surprise; these modules only define functions.
warnings.filterwarnings("ignore", message=r"'variants\.", category=RuntimeWarning)

__all__ = [
    "alibi",
    "block_diffusion",
    "block_sparse",
    "causal",
    "document",
    "full",
    "mla",
    "natten",
    "prefix_lm",
    "sink",
    "sliding_window",
    "softcap",
]
