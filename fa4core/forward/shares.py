"""Shares the keys of work tiles among several workers, on the host; `combine` merges results."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from fa4core.forward.work import FIELDS, RUN_FIELDS, Item


def shares(
    items: torch.Tensor, runs: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plan (`tables`) with the blocks of every work tile shared among `count` work tiles.

    Shares differ by one block at most; some are empty where there are fewer blocks than shares.
    """
    field = {f.name: i for i, f in enumerate(attrs.fields(Item))}
    given, of = items.numpy(), runs.numpy()
    found = np.repeat(given, count, axis=0).reshape(len(given), count, FIELDS)
    cut: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
    rows: list[np.ndarray] = [np.zeros((0, RUN_FIELDS), np.int32)]
    total = 0
    for i, item in enumerate(given):
        key = int(item[field["first_run"]]), int(item[field["end_run"]])
        if key not in cut:
            parts = _cut(of[slice(*key)], count)
            ends = total + np.cumsum([0, *map(len, parts)])
            cut[key] = ends, np.array([(p[:, 1] - p[:, 0]).sum() for p in parts])
            rows += parts
            total = ends[-1]
        ends, blocks = cut[key]
        found[i, :, field["first_run"]], found[i, :, field["end_run"]] = ends[:-1], ends[1:]
        found[i, :, field["blocks"]] = blocks
        found[i, :, field["share"]] = np.arange(count)
    return (
        torch.from_numpy(found.reshape(-1, FIELDS)),
        torch.from_numpy(np.concatenate(rows if total else [*rows, of[:1]])),
    )


def _cut(runs: np.ndarray, count: int) -> list[np.ndarray]:
    """Runs (n, 3) cut into `count` consecutive parts of equally many blocks."""
    length = runs[:, 1] - runs[:, 0]
    before = np.cumsum(length) - length
    parts = []
    for share in range(count):
        first, end = (length.sum() * (share + i) // count for i in range(2))
        part = runs.copy()
        part[:, 0] = runs[:, 0] + np.clip(first - before, 0, length)
        part[:, 1] = runs[:, 0] + np.clip(end - before, 0, length)
        parts.append(part[part[:, 0] < part[:, 1]])
    return parts
