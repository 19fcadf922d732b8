"""The part of the timing model's validation that is about backward kernels; `timing_model` runs it.

python benchmarks/backward_model.py [--seeds 3]              this part alone
python benchmarks/backward_model.py --pairs [--seeds 6]      ours with one CTA and with two
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from measured_cells import Cell, meaning  # noqa: E402
from models import LONG, problem  # noqa: E402

from fa4core.plan.roofline import backward as roofline  # noqa: E402
from fa4core.plan.target import SM100  # noqa: E402
from fa4core.timing import backward  # noqa: E402
from fa4core.timing.problem import Modelled, model  # noqa: E402
from fa4core.timing.small import Small  # noqa: E402

#: TFLOP/s of FlashAttention-4's backward pass, bf16, batch 4, 16 heads, 8192 tokens, head dim 128,
#: by (mask, CTAs of a work tile), at 1.85 GHz.
#: https://github.com/Dao-AILab/flash-attention/pull/2280
PUBLISHED = {("full", 1): 1248, ("full", 2): 1360, ("causal", 1): 1118, ("causal", 2): 1209}
PAIR_LENGTHS = (4096, 8192, 16384)
PAIR_CELLS = (
    *itertools.product((64, 96, 128), ("full", "causal")),
    *((128, name) for name in ("window 1024", "window 128", "alibi", "softcap")),
)
TEXT = """
## Backward passes

FlashAttention-4's backward pass with one CTA a work tile and with two, as its package compiles it,
batch 4, 16 heads, 8192 tokens, head dim 128. Kernels before and after the main one are counted with
the bytes that they move. Source:
[pull request 2280](https://github.com/Dao-AILab/flash-attention/pull/2280). Ours is beside it, in
the same model; nobody has measured it.

| mask | CTAs | published TFLOP/s | modelled, range over seeds | error | ours, modelled |
|---|---|---|---|---|---|"""
BUSY = """
Busy cycles of an SM for 128 keys and 128 queries, as replayed from the compiled kernel, beside
the roofline by the reasoning of the paper's section 3.2 (its table 3 has 2688 for the shared memory
of two CTAs, see [performance](performance.md#rooflines-modelled)). Replayed shared memory also has
what the roofline leaves out: Q and dO that come in (512 cycles), LSE and delta that are read (256).

| kernel | products: roofline, replayed | shared memory: likewise | exponentials: likewise |
|---|---|---|---|"""
READS = """
What all lanes of a warp read, LSE and delta, passes the banks once in the model, although profilers
count two wavefronts for it.
"""


def predict(make, cell: Cell, ctas: int, seeds: int) -> Modelled:
    """Ours or FlashAttention-4's, for a cell."""
    variant, p = meaning(cell).ours, problem(cell)
    return model(make(variant, p, "sm100", ctas), variant, p, "sm100", seeds=seeds)


def section(seeds: int) -> None:
    """Print it."""
    print(TEXT)
    found: dict[str, Modelled] = {}
    for (mask, ctas), published in PUBLISHED.items():
        cell = Cell(mask, 128, 8192)
        peer, ours = (predict(m, cell, ctas, seeds) for m in (backward.fa4, backward.ours))
        t, error = peer.tflops, peer.tflops.mean / published - 1
        shown = f"{t.mean:.0f}, {t.low:.0f} to {t.high:.0f}"
        print(
            f"| {mask} | {ctas} | {published} | {shown} | {error:+.1%} | {ours.tflops.mean:.0f} |"
        )
        if mask == "full":
            found |= {k.title: k for k in (peer, ours)}
    print(BUSY)
    for title, kernel in sorted(found.items()):
        paper = roofline(SM100, 128, 128, 128, ctas=kernel.ctas)
        terms = zip((paper.mma, paper.smem, paper.exp), ("tensor", "SMEM", "MUFU"), strict=True)
        cells = " | ".join(f"{term:.0f}, {kernel.busy[unit]:.0f}" for term, unit in terms)
        print(f"| {title} | {cells} |")
    print(READS, end="")


def pairs(seeds: int) -> None:
    """Print a table of ours with one CTA a work tile and with two."""
    titles = " | ".join(f"{length // 1024}k: 1, 2 CTAs, ratio of times" for length in PAIR_LENGTHS)
    print(f"| head dim | variant | {titles} |")
    print("|---|---|" + "---|" * len(PAIR_LENGTHS))
    for d, name in PAIR_CELLS:
        variant = meaning(Cell(name, d, LONG)).ours
        executed: dict[int, Small] = {}  # the same at all these lengths
        row = []
        for length in PAIR_LENGTHS:
            p, found = problem(Cell(name, d, length)), []
            for ctas in (1, 2):
                subject = backward.ours(variant, p, "sm100", ctas)
                if ctas not in executed:
                    executed[ctas] = Small.of(subject, variant, p, "sm100")
                known = executed[ctas]
                found.append(model(subject, variant, p, "sm100", seeds=seeds, small=known))
            one, two = found
            ratio = two.seconds.mean / one.seconds.mean
            row.append(f"{one.tflops.mean:.0f}, {two.tflops.mean:.0f}, {ratio:.2f}")
        print(f"| {d} | {name} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", action="store_true", help="Ours alone, by CTAs of a work tile.")
    given = parser.parse_args()
    (pairs if given.pairs else section)(given.seeds)
