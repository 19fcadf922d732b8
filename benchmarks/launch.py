"""Python time of a call after the first: `python benchmarks/launch.py`.

The device launch is replaced by TVM-FFI's function that does nothing, which still converts every
argument as a kernel's host function would. Tensors are small, so that the CPU's allocator takes
them from its heap, as a GPU's takes them from its pool. So this is what `attention` itself costs:
finding the prepared call, allocating the result, handing the arguments over. Not in it: what the
compiled host code and the driver do, and what allocating on a GPU costs more.

A figure is the median over batches of calls, with the quickest batch and the quartiles; CPU time of
the thread, of the quickest of several measurements, because others may use the machine. The parts
are timed by themselves and need not add up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click
import torch
import tvm_ffi
import tvm_ffi.testing
from rich.console import Console
from rich.table import Table

from fa4core import Variant, attention, dispatch, recall
from fa4core.places import Place, for_tvm_ffi
from primitives import mask, score, sequence, sink

LIMIT_US = 15.0
RECORDED_LIMIT_US = 30.0
RECORDED, OPERATOR = "recorded by autograd", "as an operator"
NOTHING = tvm_ffi.get_global_func("testing.nop")


def nowhere(_: str) -> Place:
    """A place whose launches do nothing."""
    return Place("sm100", 148, True, lambda function: NOTHING, for_tvm_ffi)


def microseconds(call: Callable[[], object], batches: int = 60, calls: int = 100) -> list[float]:
    """Time of a call in each batch."""
    for _ in range(calls):
        call()
    times = []
    for _ in range(batches):
        start = time.thread_time()
        for _ in range(calls):
            call()
        times.append((time.thread_time() - start) / calls * 1e6)
    return times


def cases() -> dict[str, Callable[[], object]]:
    q, k, v = (torch.randn(2, 32, 4, 64).bfloat16() for _ in range(3))
    learned = q.clone().requires_grad_()
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    layout = sequence.varlen(torch.tensor([0, 10, 64], dtype=torch.int32))
    causal = Variant(mask=mask.causal())
    rich = Variant(
        mask=mask.causal() & mask.sliding_window(100),
        score=score.alibi(torch.rand(4)) >> score.softcap(20.0),
        sink=sink.learned(torch.zeros(4)),
    )
    return {
        "causal": lambda: attention(q, k, v, causal, backend="emulator"),
        "window, ALiBi, softcap, sink": lambda: attention(q, k, v, rich, backend="emulator"),
        "causal, with LSE": lambda: attention(q, k, v, causal, return_lse=True, backend="emulator"),
        "causal, with LSE and row max": lambda: attention(
            q, k, v, causal, return_lse=True, return_row_max=True, backend="emulator"
        ),
        f"causal, {RECORDED}": lambda: attention(learned, k, v, causal, backend="emulator"),
        f"causal, {OPERATOR}": lambda: torch.ops.fa4core.forward(
            q, k, v, [], *[None] * 7, causal.spec, None, "emulator", False
        ),
        "causal, packed": lambda: attention(*packed, causal, layout=layout, backend="emulator"),
        "causal, packed, with LSE": lambda: attention(
            *packed, causal, layout=layout, return_lse=True, backend="emulator"
        ),
    }


def parts() -> dict[str, Callable[[], object]]:
    """Of the causal case."""
    q, k, v = (torch.randn(2, 32, 4, 64).bfloat16() for _ in range(3))
    variant = Variant(mask=mask.causal())
    attention(q, k, v, variant, backend="emulator")
    named = (q, k, v, recall.PADDED, None, "emulator")
    key = recall.key_of(*named)
    assert key is not None
    prepared = variant.calls.find(key)
    assert prepared is not None
    unread = prepared.unread
    return {
        "whether it may take the short way": lambda: recall.is_open(
            q, k, v, variant, recall.PADDED, None
        ),
        "key of the call": lambda: recall.key_of(*named),
        "look-up and check": lambda: variant.calls.find(key),
        "memory of the result": lambda: torch.empty_like(prepared.out),
        "arguments to TVM-FFI": lambda: NOTHING(q, k, v, q, *unread, *prepared.rest),
    }


@click.command()
@click.option("--repeats", default=3, show_default=True, help="Whole measurements.")
def main(repeats: int) -> None:
    """Measure and print; fails if the quickest measurement of a case is over its limit."""
    torch.set_num_threads(1)
    dispatch.in_emulator = nowhere  # type: ignore[assignment]
    table = Table("call", "median us", "quickest", "quartiles", "medians of all")
    over = []
    for kind in (cases, parts):
        for name, call in kind().items():
            with torch.set_grad_enabled(name.endswith(RECORDED)):
                runs = sorted((microseconds(call) for _ in range(repeats)), key=statistics.median)
            low, middle, high = statistics.quantiles(runs[0], n=4)
            medians = ", ".join(f"{statistics.median(r):.1f}" for r in runs)
            quickest = f"{min(runs[0]):.1f}"
            table.add_row(name, f"{middle:.1f}", quickest, f"{low:.1f} to {high:.1f}", medians)
            limit = RECORDED_LIMIT_US if name.endswith((RECORDED, OPERATOR)) else LIMIT_US
            over += [f"{name} ({limit} us)"] if kind is cases and middle > limit else []
        table.add_section()
    Console().print(table)
    if over:
        raise SystemExit(f"over the limit: {', '.join(over)}")


if __name__ == "__main__":
    main()
