"""Forward kernels of the timing model on the cells that the benchmark of speed measures."""

from __future__ import annotations

import torch
from measured_cells import TOKENS, Cell, meaning

from fa4core.plan.problem import Problem
from fa4core.timing import peer, subject
from fa4core.timing.problem import Modelled, model
from fa4core.timing.small import Small
from fa4core.timing.subject import Subject

LONG = 2048  # from this length on, the replayed tiles are the same


def problem(cell: Cell) -> Problem:
    batch = TOKENS // cell.seqlen
    lengths = (cell.seqlen,) * batch
    return Problem(
        batch=batch, heads_q=cell.heads, heads_kv=cell.heads, head_dim=cell.head_dim,
        head_dim_v=cell.head_dim, seqlens_q=lengths, seqlens_k=lengths, dtype=torch.bfloat16,
    )  # fmt: skip


def made(kernel: str, cell: Cell, target: str) -> Subject:
    """A kernel for a cell: "ours" or "fa4", with a number behind it so many CTAs a work tile."""
    name, _, ctas = kernel.partition(" ")
    maker = peer.fa4 if name == "fa4" else subject.ours
    return maker(meaning(cell).ours, problem(cell), target, int(ctas) if ctas else None)


class Models:
    """Makes models; what kernels execute is found out once for all lengths where it is the same."""

    def __init__(self, target: str, seeds: int):
        self.target, self.seeds = target, seeds
        self._small: dict[tuple, Small] = {}

    def of(self, kernel: str, cell: Cell, clock_ghz: float | None = None) -> Modelled:
        """What is modelled; at the clock that the target's times are stated for, or another."""
        if kernel == "fa4 best":
            found = self.of("fa4", cell, clock_ghz)
            single = found if found.ctas == 1 else self.of("fa4 1", cell, clock_ghz)
            return min(found, single, key=lambda m: m.seconds.mean)
        what = meaning(cell).ours, problem(cell), self.target
        small = self.small(kernel, cell)
        return model(made(kernel, cell, self.target), *what, clock_ghz, self.seeds, small=small)

    def small(self, kernel: str, cell: Cell) -> Small:
        """What it is modelled from."""
        found = made(kernel, cell, self.target)
        tile = found.rows, found.ctas, found.several, found.schedule.source
        key = kernel, cell.variant, cell.head_dim, min(cell.seqlen, LONG), tile
        if key not in self._small:
            self._small[key] = Small.of(found, meaning(cell).ours, problem(cell), self.target)
        return self._small[key]
