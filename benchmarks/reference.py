"""Measure the tiled reference on this machine: time, memory, errors.

    python benchmarks/reference.py times            # forward and backward, beside plain torch
    python benchmarks/reference.py memory           # peak memory over sequence lengths
    python benchmarks/reference.py errors           # every head dim x length x dtype x group
    python benchmarks/reference.py chunks           # scores computed at a time

Figures depend on the machine and its load; nothing in the tests is timed.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fa4core import Variant, attention  # noqa: E402
from fa4core.reference.oracle import oracle  # noqa: E402
from primitives import mask, score  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def variants(heads: int) -> dict[str, Variant]:
    slopes = 2.0 ** -(8 * torch.arange(1, heads + 1) / heads)
    causal = mask.causal()
    return {
        "full": Variant(),
        "causal": Variant(mask=causal),
        "window 1024": Variant(mask=causal & mask.sliding_window(1024)),
        "causal, ALiBi, softcap": Variant(
            mask=causal, score=score.alibi(slopes) >> score.softcap(30.0)
        ),
    }


def inputs(seqlen: int, heads: int, d: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(1, seqlen, heads, d).to(dtype).requires_grad_() for _ in range(3)]


def seconds(
    function: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    start = clock()
    function()
    return clock() - start


@click.group()
def main() -> None:
    """The tiled reference on this machine."""


@main.command()
@click.option("--seqlen", default=8192)
@click.option("--heads", default=8)
@click.option("--d", default=64)
@click.option("--dtype", default="fp32", type=click.Choice(list(DTYPES)))
@click.option("--threads", default=torch.get_num_threads())
def times(seqlen: int, heads: int, d: int, dtype: str, threads: int) -> None:
    """Seconds of a forward and a backward pass, after a warm-up."""
    torch.set_num_threads(threads)
    print(f"1 x {seqlen} x {heads} x {d}, {dtype}, {threads} threads; forward, backward in s")
    for name, variant in variants(heads).items():
        attention(*inputs(256, heads, d, DTYPES[dtype]), variant).sum().backward()
        tensors = inputs(seqlen, heads, d, DTYPES[dtype])
        out: list[torch.Tensor] = []
        forward = seconds(lambda t=tensors, v=variant, o=out: o.append(attention(*t, v)))
        print(f"{name:25}{forward:8.2f}{seconds(out[0].sum().backward):8.2f}", flush=True)
    tensors = [t.transpose(1, 2) for t in inputs(seqlen, heads, d, DTYPES[dtype])]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    forward = seconds(lambda: out.append(sdpa(*tensors, is_causal=True)))
    print(f"{'torch sdpa, causal':25}{forward:8.2f}{seconds(out[-1].sum().backward):8.2f}")


@main.command()
@click.option("--heads", default=2)
@click.option("--d", default=64)
def memory(heads: int, d: int) -> None:
    """Peak memory beyond the inputs of a forward and backward pass, each in its own process."""
    for seqlen in (1024, 4096, 16384, 65536):
        command = [sys.executable, __file__, "peak", str(seqlen), str(heads), str(d)]
        print(subprocess.run(command, check=True, text=True, capture_output=True).stdout.strip())


@main.command(hidden=True)
@click.argument("seqlen", type=int)
@click.argument("heads", type=int)
@click.argument("d", type=int)
def peak(seqlen: int, heads: int, d: int) -> None:
    """One measurement of `memory`."""
    variant = variants(heads)["window 1024"]

    def rss() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    attention(*inputs(512, heads, d, torch.float32), variant).sum().backward()
    tensors = inputs(seqlen, heads, d, torch.float32)
    size = sum(t.numel() for t in tensors) * 4 / 2**20
    before = rss()
    attention(*tensors, variant).sum().backward()
    dense = seqlen**2 * heads * 4 / 2**20
    print(
        f"seqlen {seqlen:6}: inputs {size:7.1f} MiB, peak growth {rss() - before:7.1f} MiB, "
        f"one score matrix {dense:9.1f} MiB"
    )


@main.command()
@click.option("--long/--no-long", default=True, help="Length 2046, too.")
def errors(long: bool) -> None:
    """Largest error against float64 relative to plain torch's, over the whole grid."""
    from test_attention_precision import CAP, WINDOW, allowance, plain

    lengths = [(n, n) for n in (1, 7, 63, 64, 65, 127, 128, 129, 1000)]
    lengths += [(100, 333), (333, 100), (0, 7), (7, 0)] + ([(2046, 2046)] if long else [])
    for name, dtype in DTYPES.items():
        worst, count = (0.0, ""), 0
        for d in (8, 16, 40, 64, 72, 128, 192, 256):
            for m, n in lengths:
                for group in (1, 3, 8) if m < 1000 else (1,):
                    ratio = _ratio(plain, allowance, d, m, n, group, dtype, WINDOW, CAP)
                    worst, count = max(worst, (ratio, f"d={d} {m}x{n} group={group}")), count + 1
        print(f"{name}: {count} cases, worst error / plain torch's {worst[0]:.2f} at {worst[1]}")


def _ratio(plain, allowance, d, m, n, group, dtype, window, cap) -> float:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(d + m + n)
    shapes = [(1, m, group, d), (1, n, 1, d), (1, n, 1, d), (1, m, group, d)]
    *given, weight = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    slopes = 2.0 ** -(1 + torch.arange(group) / 2)
    variant = Variant(
        mask=mask.causal() & mask.sliding_window(window),
        score=score.alibi(slopes) >> score.softcap(cap),
    )
    results = []
    for function in (
        lambda *t: attention(*t, variant),
        lambda *t: oracle(*t, variant)[0],
        lambda *t: plain(*t, slopes),
    ):
        leaves = [t.clone().requires_grad_() for t in given]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, weight.to(out.dtype))])
    ratios = [0.0]
    for ours, exact, theirs in zip(*results, strict=True):
        if exact.numel():
            error, yardstick = ((t.double() - exact).abs().max().item() for t in (ours, theirs))
            ratios.append(error / max(yardstick, allowance(exact, given, weight), 1e-300))
    return max(ratios)


@main.command()
@click.option("--seqlen", default=4096)
def chunks(seqlen: int) -> None:
    """CPU seconds over the scores computed at once (`fa4core.reference.work.MAX_SCORES`)."""
    from fa4core.reference import work

    torch.set_num_threads(1)
    tensors = inputs(seqlen, 8, 64, torch.float32)
    variant = variants(8)["causal"]
    for bits in (16, 18, 19, 20, 21, 22):
        work.MAX_SCORES = 1 << bits
        out: list[torch.Tensor] = []
        clock = time.process_time  # one thread: what else runs here matters less
        forward = seconds(lambda o=out: o.append(attention(*tensors, variant)), clock)
        backward = seconds(out[0].sum().backward, clock)
        print(f"2^{bits}: forward {forward:.2f}, backward {backward:.2f}", flush=True)


if __name__ == "__main__":
    main()
