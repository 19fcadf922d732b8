"""The main job in one program: define a variant, explain it, draw it, run it, check it.

Runs on any CPU in ten seconds or so, longer on a busy one; `./dev demo` sets everything up and runs
it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from fa4core import Variant, attention
from fa4core.testing import assert_variant_correct, oracle
from primitives import mask, score


@mask.define
def summaries(b, h, q_idx, kv_idx):
    """The last 4 of every 256 tokens are summaries that stay visible to all later tokens."""
    return kv_idx % 256 >= 252


def make(slopes: torch.Tensor) -> Variant:
    """A local window, and the summaries before it; each head learns what distance costs."""
    return Variant(
        mask=mask.causal() & (mask.sliding_window(400) | summaries),
        score=score.alibi(slopes) >> score.softcap(30.0),
    )


def wait(doing: str) -> None:
    """Say what a slow step does, before it."""
    print(f"{doing} ...", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqlen", type=int, default=2000, help="tokens (default: 2000)")
    parser.add_argument("--picture", type=Path, default=Path("demo.png"), help="PNG to write")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], requires_grad=True)
    variant = make(slopes)
    # (batch, seqlen, heads, head_dim): four query heads share two heads of keys and values.
    q, k, v = (
        torch.randn(1, arguments.seqlen, heads, 64, dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, 2, 2)
    )

    print("1. What the variant does on this problem\n", flush=True)
    explanation = variant.explain(q, k, v)
    print(explanation)
    print("The warning above is to be read and no error: here ALiBi before the cap is meant.\n")

    wait("Drawing it")
    explanation.draw(arguments.picture)
    print(f"2. Tile map, mask and score mod are drawn in {arguments.picture}\n")

    wait("Running it forward and backward on the CPU reference")
    start = time.perf_counter()
    out = attention(q, k, v, variant)
    out.float().square().mean().backward()
    elapsed = time.perf_counter() - start
    print(f"3. Forward and backward in {elapsed:.2f} s; gradient of the slopes: {slopes.grad}\n")

    wait("Comparing with the oracle")
    exact, _, _ = oracle(q, k, v, variant)
    print(f"4. Largest difference from the float64 oracle: {(out - exact).abs().max():.2e}")
    wait("Checking many shapes, layouts and dtypes; this is the longest step")
    assert_variant_correct(variant)
    print("   Outputs, LSE, all gradients and the tile map are right over many shapes and layouts.")


if __name__ == "__main__":
    main()
