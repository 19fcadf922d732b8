"""How far the timing model can be trusted on Hopper: predictions against an H200's measurements.

    python benchmarks/timing_model_sm90.py [--seeds 3] > docs/timing-validation-sm90.md
    python benchmarks/timing_model_sm90.py --measured forward.json > docs/timing-validation-sm90.md

The measurements are what `benchmarks/speed.py forward` wrote, by default those in `results/`.
Needs the `peers` extra (FlashAttention-4) and nvdisasm; takes a few minutes, no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from measured_cells import HIDDEN, TOKENS, Cell  # noqa: E402
from models import Models  # noqa: E402
from timing_model import rms, show_sensitivity  # noqa: E402

from fa4core.plan.target import SM90  # noqa: E402
from fa4core.timing.parameters import clock_of  # noqa: E402
from fa4core.timing.problem import Modelled  # noqa: E402

MEASURED = ROOT / "benchmarks" / "results" / "forward_h200.json"
SECOND = ROOT / "benchmarks" / "results" / "forward_h200_8192.json"
KERNELS = {"ours": "ours", "FA4": "fa4"}
SHOWN = 20  # pairs in the wrong order
CLEAR = 1.10  # a ratio that a ranking must get right
VARIANTS = ("causal", "full", "window", "softcap")  # that both kernels can do; how they begin
HEADER = """# Validation of the timing model on Hopper

Written by `python benchmarks/timing_model_sm90.py`; what the model is, and how to read it, is in
[the timing model](timing.md). The measurements are those of [performance](performance.md): one
H200, bf16, {tokens} tokens, hidden size {hidden}, our kernel and FlashAttention-4's
(flash-attn-4 {version}), all cells that were measured for both: {count} figures. Mean and range of
{seeds} seeds.
"""
FITTED = """
Predictions are at {clock} GHz. **That clock is fitted, nothing else is**: the clock with which the
model is right on average. It stands for what throttling leaves, which depends on the kernel, and
for whatever the model leaves out alike everywhere. The clock that the benchmark records is no
substitute: it is that of a kernel which spins right behind the timed one, and the GPU recovers
within that time. In an earlier run it said 1.64 GHz behind FlashAttention-4's full attention of
8192 tokens, head dim 128, whose 4.95 million cycles, counted by a profiler, make 1.49 GHz of its
3.33 ms. With the recorded clocks ({low:.2f} to {high:.2f} GHz) the model would be {mean:+.0%} off
on average, and by {rms:.1%} (root mean square). `benchmarks/cycles.py` counts cycles of all cells;
that was not run.
"""


@attrs.frozen
class Row:
    """A figure: TFLOP/s, measured with its spread and modelled; and the clock that was
    recorded behind it."""

    variant: str
    head_dim: int
    seqlen: int
    kernel: str
    measured: float
    spread: float
    ghz: float
    modelled: Modelled

    @property
    def cell(self) -> tuple[str, int, int]:
        return self.variant, self.head_dim, self.seqlen

    @property
    def predicted(self) -> float:
        return self.modelled.tflops.mean

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        return f"{self.variant}, {self.head_dim}, {self.seqlen}, {self.kernel}"


def rows(models: Models, path: Path) -> Iterator[Row]:
    """Every figure that was measured, with its prediction."""
    for measured in json.loads(path.read_text())["cells"]:
        cell = Cell(measured["variant"], measured["head_dim"], measured["seqlen"])
        results = measured["results"]
        if not cell.variant.startswith(VARIANTS) or not KERNELS.keys() <= results.keys():
            continue
        for name, kernel in KERNELS.items():
            result = results[name]
            spread, ghz = result["spread_ms"] / result["ms"], result["ghz"]
            # Of the FLOP that TFLOP/s are stated for the model has its own count.
            found = models.of(kernel, cell)
            tflops = found.flop / result["ms"] / 1e9
            yield Row(cell.variant, cell.head_dim, cell.seqlen, name, tflops, spread, ghz, found)


def figures(found: list[Row]) -> None:
    print("\n## Every figure\n")
    print("TFLOP/s; measured with the spread between quartiles.\n")
    columns = "variant | head dim | length | kernel | measured | modelled, range over seeds | error"
    print(f"| {columns} |\n|---|---|---|---|---|---|---|")
    for r in found:
        t = r.modelled.tflops
        measured = f"{r.measured:.0f} ({r.spread:.1%})"
        shown = f"{t.mean:.0f}, {t.low:.0f} to {t.high:.0f}"
        cells = f"{r.variant} | {r.head_dim} | {r.seqlen} | {r.kernel} | {measured} | {shown}"
        print(f"| {cells} | {r.error:+.1%} |")
    worst = max(found, key=lambda r: abs(r.error))
    parts = ", ".join(
        f"{name} {rms([r.error for r in found if name in (r.kernel, r.variant)]):.1%}"
        for name in (*KERNELS, *dict.fromkeys(r.variant for r in found))
    )
    print(
        f"\nRoot mean square error over the {len(found)}: **{rms([r.error for r in found]):.1%}**, "
        f"the largest {worst.error:+.1%} ({worst}). By part: {parts}. {fit(found)}"
    )


def fit(found: list[Row]) -> str:
    """What another clock would make of it."""
    best = clock_of(SM90) / math.exp(
        statistics.fmean(math.log(r.predicted / r.measured) for r in found)
    )
    return f"The clock that fits best is {best:.2f} GHz."


def ranking(found: list[Row]) -> None:
    pairs = [(a, b) for a in found for b in found if a.measured > CLEAR * b.measured]
    wrong = [(a, b) for a, b in pairs if a.predicted <= b.predicted]
    same = [
        (a, b)
        for a, b in pairs
        if (a.variant, a.head_dim, a.seqlen) == (b.variant, b.head_dim, b.seqlen)
    ]
    print("\n## Ranking\n")
    print(
        f"Of {len(pairs)} pairs of figures that differ by more than 10 %, the model has "
        f"{len(pairs) - len(wrong)} in the right order; of the {len(same)} among them that are two "
        f"kernels on one problem, {sum(p not in wrong for p in same)}."
    )
    if wrong:
        wrong.sort(key=lambda p: p[0].measured / p[1].measured, reverse=True)
        print(f"\nIn the wrong order, {min(SHOWN, len(wrong))} with the greatest difference:\n")
        print("| faster | slower | measured ratio | modelled |")
        print("|---|---|---|---|")
        for a, b in wrong[:SHOWN]:
            ratios = f"{a.measured / b.measured:.2f} | {a.predicted / b.predicted:.2f}"
            print(f"| {a} | {b} | {ratios} |")


def second_run(models: Models) -> None:
    """Another run on such a GPU, of fewer cells: FlashAttention-4's kernel, which is the same."""
    print("\n## Another run\n")
    print(
        "Eight cells of 8192 tokens, measured in one go of three minutes: the GPU has less time to "
        "become hot.\nFlashAttention-4's kernel, TFLOP/s.\n"
    )
    print("| variant | head dim | measured | modelled | error |\n|---|---|---|---|---|")
    errors = []
    for measured in json.loads(SECOND.read_text())["cells"]:
        if "FA4" in measured["results"]:
            cell = Cell(measured["variant"], measured["head_dim"], measured["seqlen"])
            tflops = measured["results"]["FA4"]["tflops"]
            modelled = models.of("fa4", cell).tflops.mean
            errors.append(modelled / tflops - 1)
            row = f"{cell.variant} | {cell.head_dim} | {tflops:.0f} | {modelled:.0f}"
            print(f"| {row} | {errors[-1]:+.1%} |", flush=True)
    print(f"\nRoot mean square error: {rms(errors):.1%}.")


def ratios(found: list[Row]) -> float:
    """Prints them; gives the root mean square of their errors."""
    print("\n## One kernel against the other\n")
    print(
        "How many times as fast as FlashAttention-4 ours is: what two kernels in one run of the "
        "model are for.\nThe clock is not in it.\n"
    )
    print("| variant | head dim | length | measured | modelled |\n|---|---|---|---|---|")
    errors = []
    for r, other in itertools.product(found, found):
        if r.cell == other.cell and (r.kernel, other.kernel) == ("ours", "FA4"):
            measured, modelled = r.measured / other.measured, r.predicted / other.predicted
            errors.append(modelled / measured - 1)
            cell = f"{r.variant} | {r.head_dim} | {r.seqlen}"
            print(f"| {cell} | {measured:.2f} | {modelled:.2f} |")
    print(
        f"\nRoot mean square error of the ratio: {rms(errors):.1%}, the largest "
        f"{max(errors, key=abs):+.1%}."
    )
    return rms(errors)


def roofline(found: list[Row]) -> None:
    print("\n## Busy cycles\n")
    print(
        "Of an SM for 128 queries and 128 keys, head dim 128, as replayed. From the rates: "
        "products 2048; through shared memory 1280 for\ntheir operands (P is in registers) and "
        "512 for the bytes of K and V that come in; exponentials 1024.\n"
    )
    print("| kernel | variant | products | shared memory | exponentials | cycles |")
    print("|---|---|---|---|---|---|")
    for r in found:
        if (r.seqlen, r.head_dim) == (8192, 128) and r.variant in ("causal", "full"):
            m, scale = r.modelled, 128 / r.modelled.block
            cells = (m.busy["tensor"], m.busy["SMEM"], m.busy["MUFU"], m.block_cycles.mean)
            shown = " | ".join(f"{c * scale:.0f}" for c in cells)
            print(f"| {r.kernel} | {r.variant} | {shown} |")


def sensitivity(models: Models) -> None:
    programs = {
        f"{name}, {variant}": models.small(kernel, Cell(variant, 128, 8192)).programs
        for variant in ("causal", "full")
        for name, kernel in KERNELS.items()
    }
    show_sensitivity(SM90, programs)


WORDS = """
## What a difference means

* **Time at the stated clock**: {near} of the {count} figures are within 8 %, all within
  {worst:.0%}. Part of that is the clock, which depends on the kernel and on what ran before:
  between two runs FlashAttention-4's times differed by as much as 15 %. Short tiles of
  FlashAttention-4's kernel (windows) come out too fast: from the end of a CTA to the next one takes
  longer than assumed.
* **Two kernels on one problem**: their ratio is off by {ratio:.0%} (root mean square), so a
  modelled difference of less than that says nothing, and one of twice that says which is faster.
* **What binds** is told by the replay and does not depend on the clock.

What it leaves out is listed in [the timing model](timing.md#what-it-cant-see).
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--measured", type=Path, default=MEASURED)
    given = parser.parse_args()
    models = Models("sm90", given.seeds)
    found = list(rows(models, given.measured))
    header = HEADER.format(
        tokens=TOKENS, hidden=HIDDEN, version=version("flash-attn-4"), count=len(found),
        seeds=given.seeds,
    )  # fmt: skip
    recorded = [(1 + r.error) * r.ghz / clock_of(SM90) - 1 for r in found]
    how = FITTED.format(
        clock=clock_of(SM90), low=min(r.ghz for r in found), high=max(r.ghz for r in found),
        mean=statistics.fmean(recorded), rms=rms(recorded),
    )  # fmt: skip
    print(header + how, end="")
    figures(found)
    ranking(found)
    ratio = ratios(found)
    second_run(models)
    roofline(found)
    sensitivity(models)
    errors = [abs(r.error) for r in found]
    near = sum(e <= 0.08 for e in errors)
    print(WORDS.format(near=near, count=len(found), worst=max(errors), ratio=ratio), end="")


if __name__ == "__main__":
    main()
