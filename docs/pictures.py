"""Draws the pictures of the docs into docs/img: each prebuilt variant, and the README's.

Run `python docs/pictures.py` when a picture should change, and commit the result.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import torch
from PIL import Image

import variants
from fa4core import Variant, draw
from primitives import mask, score

IMAGES = Path(__file__).parent / "img"


def readme() -> Variant:
    """The variant of README and quick start."""
    slopes = torch.tensor([2.0**-i for i in range(1, 9)])
    return Variant(
        mask=mask.causal() & (mask.sliding_window(512) | mask.sink_tokens(4)),
        score=score.alibi(slopes) >> score.softcap(30.0),
    )


def first_variant() -> Variant:
    """The mask of the tutorial."""
    summaries = mask.define(lambda b, h, q_idx, kv_idx: kv_idx % 256 >= 252)
    summaries = summaries.rename("summaries")
    return Variant(mask=mask.causal() & (mask.sliding_window(400) | summaries))


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    os.chdir(IMAGES)
    draw.variant(readme(), "readme.png", seqlen=2048, heads=8, head=3)
    draw.variant(first_variant(), "first-variant.png", seqlen=2048)
    for name in variants.__all__:
        importlib.import_module(f"variants.{name}").main()
    for picture in Path().glob("*.png"):  # a palette of 128 colours takes a third of the bytes
        Image.open(picture).convert("RGB").quantize(128).save(picture, optimize=True)


if __name__ == "__main__":
    main()
