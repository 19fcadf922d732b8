"""What a FULL tile of a masked variant costs beside one of the plain kernel.

    python benchmarks/full_tiles.py [--head-dims 64 128] [--target sm100] [--seeds 3]
    python benchmarks/full_tiles.py --measure      # on a GPU instead of in the model

Two work tiles of a masked variant's kernel are replayed that visit the same number of PARTIAL key
blocks and differ by eight FULL ones; the difference of their cycles, for a block, stands beside
that of the kernel of full attention. Needs nvdisasm and no GPU; half a minute for each kernel.

Measured are documents whose borders are those of tiles, so that all tiles are FULL or EMPTY, beside
full attention over the same documents as sequences of their own: the same tiles and tokens.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from timing import interleaved  # noqa: E402

from fa4core import attention  # noqa: E402
from fa4core.plan.kinds import PARTIAL  # noqa: E402
from fa4core.plan.plan import Plan  # noqa: E402
from fa4core.plan.problem import Problem  # noqa: E402
from fa4core.plan.target import of_capability  # noqa: E402
from fa4core.plan.target import target as planned  # noqa: E402
from fa4core.timing import subject  # noqa: E402
from fa4core.timing.problem import Modelled, model  # noqa: E402
from fa4core.timing.subject import small_problem  # noqa: E402
from fa4core.variant import Variant  # noqa: E402
from primitives import mask  # noqa: E402

SEQLEN, BATCH, HIDDEN = 8192, 4, 2048
DOCUMENT, DOCUMENTS = 1536, 4  # tokens of one, which tiles of every kernel divide
WINDOW = 4096  # more than the replayed tiles have keys, so that no block is cut at its far end
MASKS = {
    "full": mask.full(),
    "causal": mask.causal(),
    f"window {WINDOW}": mask.sliding_window(WINDOW, 0),
    "document": mask.document(offsets=[0, SEQLEN]),
    "causal document": mask.causal() & mask.document(offsets=[0, SEQLEN]),
}


def problem(d: int) -> Problem:
    heads, lengths = HIDDEN // d, (SEQLEN,) * BATCH
    return Problem(
        batch=BATCH, heads_q=heads, heads_kv=heads, head_dim=d, head_dim_v=d,
        seqlens_q=lengths, seqlens_k=lengths, dtype=torch.bfloat16,
    )  # fmt: skip


def modelled(name: str, d: int, target: str, seeds: int) -> Modelled:
    """A variant's kernel.

    Raises:
        ValueError: The replayed tiles differ by other blocks than FULL ones.
    """
    variant, p = Variant(mask=MASKS[name]), problem(d)
    found = model(subject.ours(variant, p, target), variant, p, target, seeds=seeds)
    cut = {partial_blocks(found, variant, p, target, n) for n in found.blocks}
    if len(cut) != 1:
        raise ValueError(f"{name}: {cut} PARTIAL blocks in work tiles of {found.blocks} blocks")
    return found


def partial_blocks(found: Modelled, variant: Variant, p: Problem, target: str, blocks: int) -> int:
    """Of a replayed work tile of `blocks` key blocks."""
    small = small_problem(p, found.rows, blocks * found.block, 1, found.packed)
    (partial,) = (
        Plan(variant, small, planned(target))._map(
            variant.graph.mask, found.rows, found.block
        ).lengths(PARTIAL).tolist()
    )  # fmt: skip
    return partial


def show(head_dims: list[int], target: str, seeds: int) -> None:
    print("| head dim | variant | cycles of a FULL key block, range | of the plain kernel's |")
    print("|---|---|---|---|")
    for d in head_dims:
        plain = None
        for name in MASKS:
            cycles = modelled(name, d, target, seeds).block_cycles
            plain = plain or cycles.mean
            shown = f"{cycles.mean:,.0f}, {cycles.low:,.0f} to {cycles.high:,.0f}"
            print(f"| {d} | {name} | {shown} | {cycles.mean / plain:.2f} |", flush=True)


def measure(head_dims: list[int]) -> None:
    """On this machine's GPU."""
    target = of_capability(*torch.cuda.get_device_capability())
    if target is None:
        sys.exit(
            f"{torch.cuda.get_device_name()} is no Hopper or Blackwell GPU; leave out --measure"
        )
    borders = DOCUMENT * torch.arange(DOCUMENTS + 1, dtype=torch.int32, device="cuda")
    masked = Variant(mask=mask.document(offsets=borders))
    print("| head dim | documents, ms | sequences, ms | documents / sequences |")
    print("|---|---|---|---|")
    for d in head_dims:
        size = (BATCH, DOCUMENT * DOCUMENTS, HIDDEN // d, d)
        packed = [torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        apart = [t.view(-1, DOCUMENT, HIDDEN // d, d) for t in packed]
        functions = {
            "documents": partial(attention, *packed, masked, backend=target.name),
            "sequences": partial(attention, *apart, Variant(), backend=target.name),
        }
        a, b = (f() for f in functions.values())
        torch.testing.assert_close(a.view_as(b), b)
        times = interleaved(functions)
        masked_ms, plain_ms = (times[name].median for name in functions)
        print(
            f"| {d} | {masked_ms:.3f} | {plain_ms:.3f} | {masked_ms / plain_ms:.3f} |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--target", default="sm100", choices=["sm100", "sm103", "sm90"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--measure", action="store_true", help="on this machine's GPU")
    given = parser.parse_args()
    if given.measure:
        measure(given.head_dims)
        return
    show(given.head_dims, given.target, given.seeds)


if __name__ == "__main__":
    main()
