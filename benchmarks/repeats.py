"""The same call many times on a Hopper GPU: are its results the same bits each time?

    python benchmarks/repeats.py                              # 10,000 launches of each case
    python benchmarks/repeats.py --launches 20 --device cuda:1
    compute-sanitizer --tool memcheck python benchmarks/repeats.py --launches 2

Forward passes and deterministic gradients, over GQA, block-sparse masks, packed sequences and
learned tables, alone and with other work on the device. The first results are compared with the
reference. Gradients that may be added in any order are launched too, a hundredth as often, and may
differ: where they never do, the comparison had nothing to find.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import click
import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from fa4core import Variant, attention  # noqa: E402
from primitives import mask, score, sequence, sink  # noqa: E402

Tensors = tuple[torch.Tensor, ...]
LENGTHS = (700, 0, 1, 1300, 257)


@attrs.frozen(eq=False)
class Repeated:
    """A variant, the heads of queries and keys, and how sequences of 2 x 1024 or LENGTHS lie."""

    variant: Callable[[torch.device], Variant]
    heads: tuple[int, int] = (8, 8)
    head_dim: int = 128
    packed: bool = False


def _blocks(device: torch.device) -> Variant:
    kept = torch.rand(8, 8, generator=torch.Generator().manual_seed(1)) < 0.4
    kept = (kept | torch.eye(8, dtype=torch.bool)).to(device)
    sparse = mask.define(lambda b, h, q, k: kept[q // 128, k // 128])
    return Variant(mask=mask.causal() & sparse)


def _learned(device: torch.device) -> Variant:
    slopes = torch.linspace(0.1, 0.5, 8, device=device).requires_grad_()
    table = torch.randn(64, device=device, requires_grad=True)
    distances = score.define(lambda s, b, h, q, k: s + table[(q - k).abs() % 64])
    learned = sink.learned(torch.zeros(8, device=device).requires_grad_())
    return Variant(mask=mask.causal(), score=score.alibi(slopes) >> distances, sink=learned)


CASES = {
    "full": Repeated(lambda _: Variant()),
    "causal, GQA": Repeated(lambda _: Variant(mask=mask.causal()), (8, 2)),
    "causal, d=64": Repeated(lambda _: Variant(mask=mask.causal()), (16, 4), 64),
    "block sparse": Repeated(_blocks),
    "packed": Repeated(lambda _: Variant(mask=mask.causal()), (8, 2), packed=True),
    "packed, learned": Repeated(_learned, (8, 4), 64, packed=True),
}


def calls(case: Repeated, device: torch.device) -> dict[str, Callable[[str], Tensors]]:
    """By name of what is repeated: a function of the backend that gives the results."""
    torch.manual_seed(0)
    ends = torch.tensor((0, *LENGTHS)).cumsum(0).int().to(device)
    layout = sequence.varlen(ends, ends) if case.packed else None
    sizes = [
        ((int(sum(LENGTHS)),) if case.packed else (2, 1024)) + (heads, case.head_dim)
        for heads in (case.heads[0], case.heads[1], case.heads[1])
    ]
    qkv = [torch.randn(s, device=device).bfloat16().requires_grad_() for s in sizes]
    variant = case.variant(device)
    learned = [t for t in variant.tensors if t.requires_grad]
    upstream = torch.randn(sizes[0], device=device).bfloat16()

    def forward(backend: str, deterministic: bool = False) -> Tensors:
        return attention(
            *qkv, variant, layout=layout, backend=backend, return_lse=True,
            deterministic=deterministic,
        )  # type: ignore[return-value]  # fmt: skip

    def gradients(backend: str, deterministic: bool) -> Tensors:
        key = backend, deterministic
        if key not in kept:
            kept[key] = forward(backend, deterministic)[0]
        return torch.autograd.grad(kept[key], [*qkv, *learned], upstream, retain_graph=True)

    kept: dict[tuple[str, bool], torch.Tensor] = {}
    return {
        "forward": forward,
        "gradients, deterministic": lambda backend: gradients(backend, True),
        "gradients, any order": lambda backend: gradients(backend, False),
    }


def differing(call: Callable[[], Tensors], first: Tensors, launches: int, busy: bool) -> int:
    """How many launches give other bits; `busy`: with products on another stream meanwhile."""
    count = torch.zeros((), dtype=torch.int64, device=first[0].device)
    other = torch.cuda.Stream(first[0].device)
    square = torch.randn(2048, 2048, device=first[0].device, dtype=torch.bfloat16)
    for i in range(launches):
        if busy and i % 4 == 0:
            with torch.cuda.stream(other):
                square = (square @ square).clamp_(-1, 1)
        different = [(a != b).any() for a, b in zip(call(), first, strict=True)]
        count += torch.stack(different).any()
    torch.cuda.synchronize(first[0].device)
    return int(count)


def distance(given: Tensors, wanted: Tensors) -> float:
    """The largest relative distance (Frobenius) of a result."""
    finite = [(a.float(), b.float(), b.isfinite()) for a, b in zip(given, wanted, strict=True)]
    return max(float((a[at] - b[at]).norm() / b[at].norm().clamp(min=1e-6)) for a, b, at in finite)


@click.command()
@click.option("--launches", default=10_000)
@click.option("--device", default="cuda:0", help="Another than the current one is good, too.")
@click.option("--cases", default=";".join(CASES), help="Semicolons between them.")
def main(launches: int, device: str, cases: str) -> None:
    """Print how many launches differ; exit with 1 if one differs that may not."""
    table = Table(title=f"{launches} launches, {torch.cuda.get_device_name()}")
    for column in ("case", "what", "from the reference", "differ, alone", "differ, busy", "s"):
        table.add_column(column)
    failed = False
    for name in cases.split(";"):
        for what, call in calls(CASES[name], torch.device(device)).items():
            start = time.perf_counter()
            first = tuple(t.detach().clone() for t in call("sm90"))
            far = distance(first, call("reference"))
            free = what == "gradients, any order"
            ours, times = functools.partial(call, "sm90"), launches // 100 if free else launches
            found = [differing(ours, first, times, busy) for busy in (False, True)]
            failed |= far > 2e-2 or (not free and any(found))
            seconds = f"{time.perf_counter() - start:.1f}"
            table.add_row(name, what, f"{far:.1e}", *map(str, found), seconds)
            print(name, what, f"{far:.1e}", found, seconds, flush=True)
    Console(width=120).print(table)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
