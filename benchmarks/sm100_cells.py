"""Modelled time of the Blackwell forward against FlashAttention-4's, cell by cell.

    python benchmarks/sm100_cells.py [--seeds 3] [--dims 64,128] [--lengths 1024,2048,8192,32768]

bf16, 32,768 tokens, hidden size 2,048; FlashAttention-4's better one of 1- and 2-CTA. Nothing is
measured: `docs/timing.md` says what the model is. Needs the `peers` extra and nvdisasm; about 20
minutes on two cores, no GPU.
"""

from __future__ import annotations

import argparse
from unittest import mock

import torch

from fa4core.plan.problem import Problem
from fa4core.report.peer import import_fa4
from fa4core.timing import peer, subject
from fa4core.timing.problem import Modelled, model
from fa4core.timing.small import MANY, Small
from fa4core.variant import Variant
from primitives import mask, score

TOKENS, HIDDEN, BLOCK = 32768, 2048, 128
MASKS = {
    "full": mask.full(),
    "causal": mask.causal(),
    "window 1024": mask.sliding_window(1024),
    "window 128": mask.sliding_window(128),
}
MODS = {"softcap 30": lambda heads: score.softcap(30.0), "ALiBi": score.alibi}
TARGET, LENGTH_OF_MODS = "sm100", 8192

_small: dict[tuple, Small] = {}


def problem(d: int, seqlen: int) -> Problem:
    batch, heads = TOKENS // seqlen, HIDDEN // d
    return Problem(
        batch=batch, heads_q=heads, heads_kv=heads, head_dim=d, head_dim_v=d,
        seqlens_q=(seqlen,) * batch, seqlens_k=(seqlen,) * batch, dtype=torch.bfloat16,
    )  # fmt: skip


def modelled(kind: str, name: str, variant: Variant, p: Problem, seeds: int) -> Modelled:
    """One kernel; lengths from `MANY` blocks on are replayed on the same small problems."""
    made = (subject.ours if kind == "ours" else peer.fa4)(variant, p, TARGET)
    key = kind, name, p.head_dim, min(MANY * BLOCK, p.seqlens_k[0])
    if key not in _small:
        _small[key] = Small.of(made, variant, p, TARGET)
    return model(made, variant, p, TARGET, seeds=seeds, small=_small[key])


def theirs_of(name: str, variant: Variant, p: Problem, seeds: int) -> Modelled:
    """FlashAttention-4's quicker kernel."""
    import_fa4()
    from flash_attn.cute import utils

    found = [modelled("fa4", name, variant, p, seeds)]
    if found[0].ctas > 1:
        with mock.patch.object(utils, "_fa_disable_2cta_enabled", True):
            found.append(modelled("fa4, 1 CTA", name, variant, p, seeds))
    return min(found, key=lambda m: m.seconds.mean)


def shown(m: Modelled) -> str:
    us = [1e6 * s for s in (m.seconds.mean, m.seconds.low, m.seconds.high)]
    return f"{us[0]:,.0f} ({us[1]:,.0f} to {us[2]:,.0f})"


def against_fa4(dims: list[int], lengths: list[int], seeds: int) -> None:
    print("| head dim | mask | length | ours, us | FlashAttention-4, us | ratio |")
    print("|---|---|---|---|---|---|")
    for d in dims:
        for name, made in MASKS.items():
            for seqlen in lengths:
                variant, p = Variant(mask=made), problem(d, seqlen)
                ours, theirs = (
                    modelled("ours", name, variant, p, seeds),
                    theirs_of(name, variant, p, seeds),
                )
                ratio = ours.seconds.mean / theirs.seconds.mean
                row = d, name, seqlen, shown(ours), shown(theirs), f"{ratio:.2f}"
                print("| " + " | ".join(map(str, row)) + " |", flush=True)


def of_mods(dims: list[int], seeds: int) -> None:
    print("\n| head dim | causal with | us | plain causal, us | ratio |")
    print("|---|---|---|---|---|")
    for d in dims:
        p = problem(d, LENGTH_OF_MODS)
        plain = modelled("ours", "causal", Variant(mask=MASKS["causal"]), p, seeds)
        for name, made in MODS.items():
            variant = Variant(mask=MASKS["causal"], score=made(p.heads_q))
            found = modelled("ours", name, variant, p, seeds)
            ratio = found.seconds.mean / plain.seconds.mean
            row = d, name, shown(found), shown(plain), f"{ratio:.2f}"
            print("| " + " | ".join(map(str, row)) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--lengths", default="1024,2048,8192,32768")
    given = parser.parse_args()
    dims, lengths = ([int(n) for n in x.split(",")] for x in (given.dims, given.lengths))
    of_mods(dims, given.seeds)
    print()
    against_fa4(dims, lengths, given.seeds)


if __name__ == "__main__":
    main()
