"""Masks: which keys a query attends to.

`define` makes one of a plain Python function; the rest are prebuilt. All are values of class
`Mask` and combine with `&`, `|`, `~`, `^`, `-`, `.shift` and `.restrict`.
"""

from primitives.mask.blocks import block_causal, block_diffusion, chunked
from primitives.mask.core import Mask, define, per_head, select
from primitives.mask.dense import dense
from primitives.mask.documents import document, shared_prefix
from primitives.mask.global_tokens import global_tokens
from primitives.mask.neighborhood import natten
from primitives.mask.random import random
from primitives.mask.tree import tree
from primitives.mask.windows import (
    causal,
    dilated_window,
    full,
    prefix_lm,
    sink_tokens,
    sliding_window,
)

__all__ = [
    "Mask",
    "block_causal",
    "block_diffusion",
    "causal",
    "chunked",
    "define",
    "dense",
    "dilated_window",
    "document",
    "full",
    "global_tokens",
    "natten",
    "per_head",
    "prefix_lm",
    "random",
    "select",
    "shared_prefix",
    "sink_tokens",
    "sliding_window",
    "tree",
]
