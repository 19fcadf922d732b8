"""Measure tile shapes of the Hopper forward on a Hopper GPU; the choices are in its `tuning.py`.

    python benchmarks/tune_sm90.py 128 "2,128 2,176 2,128,turns=0" --seqlens 4096,8192

A shape is groups,keys and by name any fields of `Shape`, any of `Schedule` such as
`source=one_tile`, `row_max=1` (with row maxima), `dealt=0` (every n-th work tile to each CTA) and
`fraction=0.25` (of the exponentials and the like, by polynomial). All candidates of a mask run
interleaved, and FlashAttention-4 beside them if it is installed.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import click
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from timing import interleaved  # noqa: E402

from fa4core import Variant  # noqa: E402
from fa4core.dispatch import analysed  # noqa: E402
from fa4core.forward import metadata  # noqa: E402
from fa4core.forward.lists import every_nth  # noqa: E402
from fa4core.places import on_device  # noqa: E402
from fa4core.plan.plan import plan  # noqa: E402
from fa4core.plan.problem import Problem  # noqa: E402
from fa4core.prepared import Prepared, prepare  # noqa: E402
from fa4core.sm90.forward.launch import shaped  # noqa: E402
from fa4core.sm90.forward.tuning import Shape  # noqa: E402
from primitives import exp, mask, score  # noqa: E402
from primitives.schedule import Schedule  # noqa: E402

MASKS: dict[str, Callable[[int], Variant]] = {  # by the number of heads
    "causal": lambda heads: Variant(mask=mask.causal()),
    "full": lambda heads: Variant(),
    "window 1024": lambda heads: Variant(mask=mask.causal() & mask.sliding_window(1024, 0)),
    "window 128": lambda heads: Variant(mask=mask.causal() & mask.sliding_window(128, 0)),
    "softcap": lambda heads: Variant(mask=mask.causal(), score=score.softcap(30.0)),
    "alibi": lambda heads: Variant(mask=mask.causal(), score=score.alibi(_slopes(heads))),
}
FA4: dict[str, dict[str, Any]] = {  # what it has arguments for
    "causal": {"causal": True},
    "full": {},
    "window 1024": {"causal": True, "window_size": (1024, 0)},
    "window 128": {"causal": True, "window_size": (128, 0)},
    "softcap": {"causal": True, "softcap": 30.0},
}


def _slopes(heads: int) -> torch.Tensor:
    return 2.0 ** -(8 * torch.arange(1, heads + 1, device="cuda") / heads)


def parsed(text: str) -> tuple[Shape, dict[str, str]]:
    """The shape, and the options that are none of its fields."""
    groups, keys, *rest = text.split(",")
    given = dict(item.split("=") for item in rest)
    fields = _names(Shape)
    numbers: dict[str, Any] = {k: int(v) for k, v in given.items() if k in fields}
    shape = Shape(int(groups), int(keys), **numbers)
    return shape, {k: v for k, v in given.items() if k not in fields}


def _names(of: type) -> set[str]:
    return {f.name for f in attrs.fields(of)}


def call(text: str, name: str, head_dim: int, seqlen: int, tokens: int) -> tuple[Prepared, tuple]:
    shape, options = parsed(text)
    torch.manual_seed(0)
    size = (max(1, tokens // seqlen), seqlen, 2048 // head_dim, head_dim)
    q, k, v = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    chosen = {k: v for k, v in options.items() if k in _names(Schedule)}
    variant = attrs.evolve(
        MASKS[name](2048 // head_dim),
        schedule=Schedule(**chosen),  # type: ignore[arg-type]
        exp=exp.mixed(3, float(options.get("fraction", 0.0))),
    )
    what = analysed(variant.program, Problem.from_tensors(q, k, v), None, head_dim**-0.5)
    place = on_device("sm90", torch.device("cuda"))
    skeleton = shaped(shape, row_max=bool(int(options.get("row_max", 0))))
    deal = metadata.dealt
    if options.get("dealt") == "0":
        deal = lambda items, ctas: every_nth(len(items), ctas)  # noqa: E731
    with mock.patch.object(metadata, "dealt", deal):
        return prepare(skeleton, what, q, k, v, place), (q, k, v)


def _compile(text: str, name: str, head_dim: int) -> None:
    call(text, name, head_dim, 512, 512)


def compiled(
    compile_: Callable[[str, str, int], object], texts: list[str], names: list[str], head_dim: int
) -> list[str]:
    """Fill the kernel cache, several at a time; the candidates that compile for every mask."""
    jobs = list(itertools.product(texts, names))
    context = multiprocessing.get_context("spawn")
    failed = set()
    with concurrent.futures.ProcessPoolExecutor(min(12, len(jobs)), context) as pool:
        for text, job in [(t, pool.submit(compile_, t, name, head_dim)) for t, name in jobs]:
            if error := job.exception():
                print(f"failed {text}: {type(error).__name__}: {str(error)[:300]}")
                failed.add(text)
    return [text for text in texts if text not in failed]


def show(functions: dict[str, Callable[[], object]], flops: float) -> None:
    """Time them against each other, and print."""
    for text, time in interleaved(functions).items():
        tflops, spread = flops / time.median / 1e9, time.spread / time.median
        print(f"  {text:<44} {tflops:7.1f} TFLOP/s  {time.median:8.4f} ms  {spread:6.1%}")


@click.command()
@click.argument("head_dim", type=int)
@click.argument("shapes")
@click.option("--masks", default="causal,full", help="Comma-separated: " + ", ".join(MASKS))
@click.option("--seqlens", default="8192", help="Comma-separated.")
@click.option("--tokens", default=32768)
def main(head_dim: int, shapes: str, masks: str, seqlens: str, tokens: int) -> None:
    """TFLOP/s of each shape, mask and length."""
    names, texts = masks.split(","), shapes.split()
    texts = compiled(_compile, texts, names, head_dim)
    for name, seqlen in itertools.product(names, map(int, seqlens.split(","))):
        measure(texts, name, head_dim, seqlen, tokens)


def measure(texts: list[str], name: str, head_dim: int, seqlen: int, tokens: int) -> None:
    functions, problem = {}, None
    for text in texts:
        prepared, inputs = call(text, name, head_dim, seqlen, tokens)
        functions[text] = functools.partial(prepared, *inputs)
        problem = Problem.from_tensors(*inputs)
    functions |= _peer(name, inputs)
    assert problem is not None
    flops = 4 * head_dim * plan(MASKS[name](2048 // head_dim), problem).attended
    reference = None
    for text, function in functions.items():
        out = function()[0].float()
        reference = out if reference is None else reference
        error = ((out - reference).norm() / reference.norm()).item()
        if error > 5e-3:
            print(f"WRONG {text} {name}: {error:.2e} from the first candidate")
    print(f"d={head_dim} {name} seqlen {seqlen}")
    show(functions, flops)


def _peer(name: str, inputs: tuple) -> dict[str, Any]:
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError:
        return {}
    if name not in FA4:
        return {}
    return {"FlashAttention-4": lambda: flash_attn_func(*inputs, **FA4[name])}


if __name__ == "__main__":
    main()
