"""Time and memory of the tile analysis: `python benchmarks/tile_map.py [--without-torch]`.

Each case runs in a process of its own, because peak memory is a process's. The figure is the peak
beyond what was resident before the analysis (mask traced, captured tensors made); time is the
best of several runs; the first run and the best CPU time (on a busy machine the better measure) are
given too. For comparison, torch's `create_block_mask` builds
the causal map at 32,768 (it needs about 10 GB; `--without-torch` leaves it out).
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import click
import torch
from rich.console import Console
from rich.table import Table

Mask = Callable[..., torch.Tensor]

MILLION = 1 << 20


def document_ids(length: int, count: int, seed: int = 0) -> torch.Tensor:
    """Sorted ids of `count` documents of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randperm(length - 1, generator=generator)[: count - 1] + 1
    return torch.bincount(cuts, minlength=length).cumsum(0).int()


def causal(b, h, q, k):  # type: ignore[no-untyped-def]
    return q >= k


def window_and_documents() -> Mask:
    ids = document_ids(MILLION, 300)
    return lambda b, h, q, k: (q >= k) & (q - k < 4096) & (ids[q] == ids[k])


def shuffled_documents() -> Mask:
    ids = torch.randperm(300)[document_ids(MILLION, 300).long()]
    return lambda b, h, q, k: ids[q] == ids[k]


def neighbourhood() -> Mask:
    """13 x 13 on a canvas of 1048 rows of 1000: rows do not divide the tile."""

    def mask(b, h, q, k):  # type: ignore[no-untyped-def]
        near_x = ((q % 1000).clamp(6, 993) - k % 1000).abs() <= 6
        near_y = ((q // 1000).clamp(6, 1041) - k // 1000).abs() <= 6
        return near_x & near_y

    return mask


def block_diffusion() -> Mask:
    half = MILLION // 2

    def mask(b, h, q, k):  # type: ignore[no-untyped-def]
        q_noised, k_noised = q < half, k < half
        q_block, k_block = (q % half) // 100, (k % half) // 100
        same = (q_block == k_block) & (q_noised == k_noised)
        earlier = (q_block > k_block) & q_noised & ~k_noised
        return same | earlier | ((q_block >= k_block) & ~q_noised & ~k_noised)

    return mask


def dilated() -> Mask:
    return lambda b, h, q, k: ((q - k).abs() <= 4096) & ((q - k).abs() % 64 == 0)


def windows_per_head() -> Mask:
    widths = torch.randint(100, 8000, (64,))
    return lambda b, h, q, k: (q >= k) & (q - k < widths[h])


def block_matrix() -> Mask:
    chosen = torch.rand(1, 32, 256, 256) < 0.1
    return lambda b, h, q, k: chosen[b, h, q // 128, k // 128]


def noise() -> Mask:
    ids = torch.randint(0, 300, (MILLION,))
    return lambda b, h, q, k: ids[q] == ids[k]


#: name: (builds the mask, batch, heads, length)
CASES: dict[str, tuple[Callable[[], Mask], int, int, int]] = {
    "causal, 32k": (lambda: causal, 1, 1, 32768),
    "causal, window 4096, 300 documents, 1M": (window_and_documents, 1, 1, MILLION),
    "300 documents in random order, 1M": (shuffled_documents, 1, 1, MILLION),
    "neighbourhood 13x13 on 1000x1048": (neighbourhood, 1, 1, 1_048_000),
    "block diffusion, blocks of 100, 1M": (block_diffusion, 1, 1, MILLION),
    "dilated by 64, 1M": (dilated, 1, 1, MILLION),
    "64 windows, batch 4, 32k": (windows_per_head, 4, 64, 32768),
    "random block matrices, 32 heads, 32k": (block_matrix, 1, 32, 32768),
    "random ids (no structure), 1M": (noise, 1, 1, MILLION),
}
TORCH = "torch create_block_mask, causal, 32k"


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, repeats: int) -> dict[str, object]:
    """Run one case in this process."""
    if name == TORCH:
        from torch.nn.attention.flex_attention import create_block_mask

        create_block_mask(causal, 1, 1, 256, 256, device="cpu")  # imports and first-call costs
        before, start, cpu = peak_bytes(), time.perf_counter(), time.process_time()
        create_block_mask(causal, 1, 1, 32768, 32768, device="cpu")
        seconds = time.perf_counter() - start
        return {
            "first": seconds,
            "best": seconds,
            "cpu": time.process_time() - cpu,
            "bytes": peak_bytes() - before,
            "tiles": "",
        }
    from fa4core.plan.tiles import tile_map
    from primitives.expr.trace import trace

    make, batch, heads, length = CASES[name]
    mask = trace(make(), ("b", "h", "q", "k"), "mask")
    lengths = [length] * batch
    tile_map(mask, batch=batch, heads=heads, seqlens_q=[1] * batch, seqlens_k=[1] * batch)
    before = peak_bytes()
    times, cpu_times = [], []
    for _ in range(repeats):
        start, cpu = time.perf_counter(), time.process_time()
        tiles = tile_map(mask, batch=batch, heads=heads, seqlens_q=lengths, seqlens_k=lengths)
        times.append(time.perf_counter() - start)
        cpu_times.append(time.process_time() - cpu)
    memory = peak_bytes() - before
    start = time.perf_counter()
    tiles.transpose()
    return {
        "first": times[0],
        "best": min(times),
        "cpu": min(cpu_times),
        "bytes": memory,
        "transpose": time.perf_counter() - start,
        "tiles": "/".join(f"{n:,}" for n in tiles.counts().values()),
    }


@click.command()
@click.option("--without-torch", is_flag=True, help="Leave out torch's create_block_mask.")
@click.option("--repeats", default=5, show_default=True)
@click.option("--case", "only", help="Run this case here and print JSON.")
def main(without_torch: bool, repeats: int, only: str | None) -> None:
    """Measure the tile analysis."""
    if only:
        print(json.dumps(measure(only, repeats)))
        return
    table = Table(
        "case", "first", "best", "CPU", "peak memory", "transpose", "empty/partial/full tiles"
    )
    for name in [*CASES, *([] if without_torch else [TORCH])]:
        command = [sys.executable, __file__, "--case", name, "--repeats", str(repeats)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            table.add_row(name, f"failed: {done.stderr.strip().splitlines()[-1:]}")
            continue
        r = json.loads(done.stdout)
        transpose = f"{r['transpose'] * 1e3:,.0f} ms" if "transpose" in r else ""
        times = [f"{r[key] * 1e3:,.1f} ms" for key in ("first", "best", "cpu")]
        table.add_row(name, *times, f"{r['bytes'] / 1e6:,.0f} MB", transpose, r["tiles"])
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    console.print(f"{torch.get_num_threads()} torch threads; numpy runs on one core")


if __name__ == "__main__":
    main()
