"""Score mods of graph transformers: Graphormer's spatial and edge encodings (arXiv:2106.05234)."""

from __future__ import annotations

import torch

from primitives.arguments import checked_floats, checked_integers
from primitives.score.core import ScoreMod, named

_PAIRS = "integers of shape (nodes, nodes) or (batch, nodes, nodes)"


def graphormer_spatial(table: torch.Tensor, distances: torch.Tensor) -> ScoreMod:
    """`score + table[h, distance of the nodes]` (Graphormer, section 3.1.2).

    Args:
        table: Floating point (heads_q, buckets); learned if it requires grad.
        distances: Integer (nodes, nodes) or (batch, nodes, nodes): the bucket of each pair, e.g.
            its shortest path's length, with one more bucket for unreachable pairs.

    Raises:
        TypeError, ValueError: Another dtype or rank, or a bucket that the table doesn't have.
    """
    checked_floats(table, "table", (2,), "(heads_q, buckets)")
    checked_integers(distances, "distances", (2, 3), _PAIRS)
    _check_entries(distances, "distances", table.shape[1])

    rank = distances.dim()

    def spatial_mod(score, b, h, q_idx, kv_idx):
        pair = (b, q_idx, kv_idx)[3 - rank :]
        return score + table[h, distances[pair]]

    return named("graphormer_spatial", spatial_mod)


def graphormer_edge(
    table: torch.Tensor, path_types: torch.Tensor, path_lengths: torch.Tensor
) -> ScoreMod:
    """`score +` the mean, over the edges of the shortest path, of `table[h, place, edge type]`.

    (Graphormer, section 3.1.3, for categorical edge features.)

    Args:
        table: Floating point (heads_q, places, types); learned if it requires grad.
        path_types: Integer (nodes, nodes, places) or (batch, nodes, nodes, places): type of each
            edge of the path; ignored behind its end. The places are written out in the kernel:
            keep them few.
        path_lengths: Integer (nodes, nodes) or (batch, nodes, nodes): edges of the path, at most
            `places`; 0 for none.

    Raises:
        TypeError, ValueError: Another dtype or rank, or a type that the table doesn't have.
    """
    checked_floats(table, "table", (3,), "(heads_q, places, types)")
    accepted = "integers of shape (nodes, nodes, places) or (batch, nodes, nodes, places)"
    checked_integers(path_types, "path_types", (3, 4), accepted)
    checked_integers(path_lengths, "path_lengths", (2, 3), _PAIRS)
    places = table.shape[1]
    if path_types.shape[-1] != places:
        raise ValueError(
            f"path_types has {path_types.shape[-1]} places and table {places}; they must agree"
        )
    rank = path_lengths.dim()
    if path_types.dim() != rank + 1:
        raise ValueError(
            f"path_types has {path_types.dim()} dimensions and path_lengths {rank}; path_types "
            "needs one more"
        )
    _check_entries(path_types, "path_types", table.shape[2])

    def edge_mod(score, b, h, q_idx, kv_idx):
        pair = (b, q_idx, kv_idx)[3 - rank :]
        length, types = path_lengths[pair], path_types[pair]
        total = torch.zeros_like(score)
        for place in range(places):
            here = table[h, place, types[place]]
            total = total + torch.where(length > place, here, 0.0)
        return score + total / length.clamp(min=1)

    return named("graphormer_edge", edge_mod)


def _check_entries(indices: torch.Tensor, what: str, count: int) -> None:
    if indices.device.type != "cpu" or not indices.numel():
        return
    least, most = int(indices.min()), int(indices.max())
    if least < 0 or most >= count:
        raise ValueError(f"{what} names entries {least}..{most}; the table has 0..{count - 1}")
