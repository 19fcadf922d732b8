"""How far our forward pipelines stay behind their roofline: the constants of `fa4core.plan.costs`.

    python benchmarks/pipeline_costs.py [--targets sm100 sm103] [--seeds 6]

Prints, for each target and head dim, an entry of `fa4core/plan/costs.py`: the timing model's cycles
of our causal kernel, 8192 tokens, as the call gets it. Needs nvdisasm and no GPU; half a minute for
each line. Whoever changes the kernel runs it anew.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from fa4core.plan.plan import Plan  # noqa: E402
from fa4core.plan.problem import Problem  # noqa: E402
from fa4core.plan.target import target as planned  # noqa: E402
from fa4core.timing import subject  # noqa: E402
from fa4core.timing.problem import model  # noqa: E402
from fa4core.variant import Variant  # noqa: E402
from primitives import mask  # noqa: E402

SEQLEN, BATCH, HEADS = 8192, 4, 16
HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
CAUSAL = Variant(mask=mask.causal())


def line(target: str, head_dim: int, head_dim_v: int, seeds: int) -> str:
    """An entry of `forward_cost`."""
    lengths = (SEQLEN,) * BATCH
    problem = Problem(
        batch=BATCH, heads_q=HEADS, heads_kv=HEADS, head_dim=head_dim, head_dim_v=head_dim_v,
        seqlens_q=lengths, seqlens_k=lengths, dtype=torch.bfloat16,
    )  # fmt: skip
    found = model(subject.ours(CAUSAL, problem, target), CAUSAL, problem, target, seeds=seeds)
    bound = Plan(CAUSAL, problem, planned(target)).roofline().cycles
    block, tile, setup = (
        round(s.mean) for s in (found.block_cycles, found.tile_cycles, found.setup_cycles)
    )
    return f"({head_dim}, Cost({bound:.0f} / {block}, {tile + setup}, {setup})),"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", nargs="+", default=["sm100", "sm103"])
    parser.add_argument("--seeds", type=int, default=6)
    given = parser.parse_args()
    for target in given.targets:
        print(f"{target}:")
        for dims in HEAD_DIMS:
            print(f"    {line(target, *dims, given.seeds)}", flush=True)


if __name__ == "__main__":
    main()
