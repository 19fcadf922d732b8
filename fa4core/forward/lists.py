"""Static lists of work tiles, one for each CTA of a persistent launch, made on the host.

Dealing every n-th tile to each of n CTAs would leave those that get the longest tile of each round
4 % behind the others in a causal problem, and far behind with unequal sequences.
"""

from __future__ import annotations

import heapq

import attrs
import numpy as np
import torch

from fa4core.forward.work import Item

#: Key blocks that a work tile costs besides its blocks, roughly; see `Cost.tile_cycles`.
TILE = 2
BLOCKS = [f.name for f in attrs.fields(Item)].index("blocks")


def dealt(items: torch.Tensor, ctas: int) -> np.ndarray:
    """The CTA of each tile: in order, each to the one that is done first.

    Args:
        items: (n, fields), in the order in which they are handed out.
        ctas: How many there are at most.
    """
    free = [(0, cta) for cta in range(ctas)]
    owner = np.empty(len(items), np.int64)
    for i, cost in enumerate((items[:, BLOCKS] + TILE).tolist()):
        done, owner[i] = free[0]
        heapq.heapreplace(free, (done + cost, owner[i]))
    return owner


def every_nth(count: int, ctas: int) -> np.ndarray:
    """The CTA of each tile, in turns: what can be said without knowing the tiles."""
    return np.arange(count) % ctas


def listed(owner: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The tiles, list by list, and where each list begins and the last one ends (int32).

    Args:
        owner: The CTA of each tile.
    """
    ends = np.cumsum(np.bincount(owner, minlength=1))
    order = np.argsort(owner, kind="stable")
    begins = torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32))
    return torch.from_numpy(order), begins
