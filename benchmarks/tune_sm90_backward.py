"""Measure tile shapes of the Hopper backward on a Hopper GPU; the choices are in its `tuning.py`.

    python benchmarks/tune_sm90_backward.py 128 "64,stages=3 64,stages=2" --seqlens 4096,16384

A shape is its queries and by name any other fields of `Shape`, any of `Schedule` such as
`source=one_tile`, and `deterministic=1`. All candidates of a mask run interleaved, FlashAttention-4
beside them if it is installed. A time is that of all three kernels. With --once each runs once and
nothing is timed: for a profiler.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import click
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from tune_sm90 import FA4, MASKS, compiled, show  # noqa: E402

from fa4core import attention  # noqa: E402
from fa4core.backward.prepared import prepare  # noqa: E402
from fa4core.dispatch import analysed  # noqa: E402
from fa4core.places import on_device  # noqa: E402
from fa4core.plan.plan import plan  # noqa: E402
from fa4core.plan.problem import Problem  # noqa: E402
from fa4core.sm90.backward.launch import shaped  # noqa: E402
from fa4core.sm90.backward.tuning import Shape  # noqa: E402
from primitives.schedule import Schedule  # noqa: E402

Tensors = tuple[torch.Tensor, ...]
WRONG = 1e-2  # relative distance from the first candidate


def parsed(text: str) -> tuple[Shape, dict[str, str]]:
    """The shape, and the options that are none of its fields."""
    queries, *rest = text.split(",")
    given = dict(item.split("=") for item in rest)
    fields = {f.name for f in attrs.fields(Shape)}
    numbers: dict[str, Any] = {k: int(v) for k, v in given.items() if k in fields}
    return Shape(int(queries), **numbers), {k: v for k, v in given.items() if k not in fields}


def inputs(head_dim: int, seqlen: int, tokens: int) -> Tensors:
    """q, k, v and dO."""
    torch.manual_seed(0)
    size = (max(1, tokens // seqlen), seqlen, 2048 // head_dim, head_dim)
    return tuple(torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(4))


def passed(name: str, given: Tensors) -> Tensors:
    """Output and LSE of the forward pass."""
    q, k, v, _ = given
    variant = MASKS[name](q.shape[2])
    out, lse = attention(q, k, v, variant, return_lse=True, backend="sm90")
    return out, lse


def ours(text: str, name: str, given: Tensors, forward: Tensors) -> Callable[[], Tensors]:
    shape, options = parsed(text)
    q, k, v, upstream = given
    deterministic = bool(int(options.pop("deterministic", 0)))
    variant = MASKS[name](q.shape[2])
    if options:
        variant = attrs.evolve(variant, schedule=Schedule(**options))  # type: ignore[arg-type]
    what = analysed(variant.program, Problem.from_tensors(q, k, v), None, q.shape[-1] ** -0.5)
    place, (out, lse) = on_device("sm90", q.device), forward
    prepared = prepare(shaped(shape), what, upstream, None, q, k, v, out, place, deterministic)

    def run() -> Tensors:
        found = prepared(upstream, None, q, k, v, out, lse)
        return found.q, found.k, found.v

    return run


def fa4(name: str, given: Tensors, forward: Tensors) -> dict[str, Callable[[], Tensors]]:
    try:
        from flash_attn.cute.interface import flash_attn_func
    except ImportError:
        return {}
    if name not in FA4:
        return {}
    leaves = [t.clone().requires_grad_() for t in given[:3]]
    out = flash_attn_func(*leaves, **FA4[name])[0]
    return {
        "FlashAttention-4": lambda: torch.autograd.grad(out, leaves, given[3], retain_graph=True)
    }


def _compile(text: str, name: str, head_dim: int) -> None:
    given = inputs(head_dim, 512, 512)
    ours(text, name, given, passed(name, given))


@click.command()
@click.argument("head_dim", type=int)
@click.argument("shapes")
@click.option("--masks", default="causal,full", help="Comma-separated: " + ", ".join(MASKS))
@click.option("--seqlens", default="8192", help="Comma-separated.")
@click.option("--tokens", default=32768)
@click.option("--once", is_flag=True, help="Run each candidate once, for a profiler.")
def main(head_dim: int, shapes: str, masks: str, seqlens: str, tokens: int, once: bool) -> None:
    """TFLOP/s of each shape, mask and length."""
    names, texts = masks.split(","), shapes.split()
    texts = compiled(_compile, texts, names, head_dim)
    for name, seqlen in itertools.product(names, map(int, seqlens.split(","))):
        measure(texts, name, inputs(head_dim, seqlen, tokens), once)


def measure(texts: list[str], name: str, given: Tensors, once: bool) -> None:
    forward = passed(name, given)
    functions = {text: ours(text, name, given, forward) for text in texts}
    functions |= fa4(name, given, forward)
    wanted = None
    for text, function in functions.items():
        found = [t.float() for t in function()]
        wanted = found if wanted is None else wanted
        errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, wanted, strict=True)]
        if max(errors) > WRONG:
            print(f"WRONG {text} {name}: dQ, dK, dV {errors} from the first candidate")
    q, k, v, _ = given
    print(f"d={q.shape[-1]} {name} seqlen {q.shape[1]}", flush=True)
    if once:
        return
    problem = Problem.from_tensors(q, k, v)
    flops = 10 * q.shape[-1] * plan(MASKS[name](q.shape[2]), problem).attended
    show(functions, flops)


if __name__ == "__main__":
    main()
