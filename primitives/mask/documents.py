"""Masks of packed sequences: documents that don't see each other, suffixes that share a prefix."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from primitives.arguments import checked_integers
from primitives.mask.core import Mask, named
from primitives.wording import counted

_IDS = "an integer tensor of shape (seqlen,) or (batch, seqlen)"
_OFFSETS = "increasing offsets of shape (documents + 1,) that start with 0, e.g. cu_seqlens"


def document(
    ids: torch.Tensor | None = None,
    key_ids: torch.Tensor | None = None,
    *,
    offsets: torch.Tensor | Sequence[int] | None = None,
    key_offsets: torch.Tensor | Sequence[int] | None = None,
) -> Mask:
    """A query attends to the keys of its own document. Combine it with `causal()` as needed.

    Ids or offsets are run-time tensors. Ids may be in any order; sorted ones let the tile analysis
    skip what lies between documents.

    Args:
        ids: Document of each token, (seqlen,) or (batch, seqlen), integer.
        key_ids: Document of each key, if keys are other tokens than the queries (cross-attention).
        offsets: Instead of ids: where each document starts and the last one ends, as `cu_seqlens`.
        key_offsets: Likewise for keys.

    Raises:
        TypeError, ValueError: Both ids and offsets or neither, floats, or a wrong shape.
    """
    queries = _ids("ids", ids, "offsets", offsets)
    if queries is None:
        raise TypeError("document needs ids or offsets; got neither")
    keys = _ids("key_ids", key_ids, "key_offsets", key_offsets)
    keys = queries if keys is None else keys

    def document_mask(b, h, q_idx, kv_idx):
        return _token(queries, b, q_idx) == _token(keys, b, kv_idx)

    return named("document", document_mask)


def shared_prefix(
    offsets: torch.Tensor | Sequence[int],
    prefix_of: torch.Tensor | Sequence[int] | None = None,
) -> Mask:
    """Segments packed in one sequence, where several suffixes share one prefix. Causal.

    A token attends to the tokens of its own segment up to itself and to all of its segment's
    prefix: several answers to one prompt without copies of the prompt (e.g. Hydragen,
    arXiv:2402.05099).

    Args:
        offsets: (segments + 1,): where each segment starts and the last one ends.
        prefix_of: (segments,): the segment that is the prefix of each; a prefix names itself.
            None: the first segment is everybody's.

    Raises:
        ValueError: A prefix that comes after its suffix, or has a prefix itself.
    """
    bounds = checked_offsets("offsets", offsets)
    count = len(bounds) - 1
    if prefix_of is None:
        parents = torch.zeros(count, dtype=torch.int64)
    else:
        parents = torch.as_tensor(prefix_of)
        checked_integers(parents, "prefix_of", (1,), "an integer tensor of shape (segments,)")
        parents = parents.long().cpu()
    if len(parents) != count:
        raise ValueError(
            f"prefix_of has {counted(len(parents), 'entry', 'entries')} for "
            f"{counted(count, 'segment')}; one each"
        )
    for i, parent in enumerate(parents.tolist()):
        if not 0 <= parent <= i or int(parents[parent]) != parent:
            raise ValueError(
                f"prefix_of[{i}]={parent}; a segment's prefix is itself or an earlier segment that "
                "is its own prefix"
            )
    segment = ids_of(bounds)
    prefix = parents.to(segment.device, segment.dtype)[segment.long()]

    def shared_prefix_mask(b, h, q_idx, kv_idx):
        of_key = segment[kv_idx]
        return ((of_key == segment[q_idx]) | (of_key == prefix[q_idx])) & (kv_idx <= q_idx)

    return named("shared_prefix", shared_prefix_mask)


def checked_offsets(name: str, offsets: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Offsets as an integer tensor, 0 first and never decreasing."""
    tensor = torch.as_tensor(offsets)
    checked_integers(tensor, name, (1,), _OFFSETS)
    if len(tensor) < 2:
        raise ValueError(f"{name} has {len(tensor)} entries; accepted are {_OFFSETS}")
    if int(tensor[0]) != 0 or bool((tensor.diff() < 0).any()):
        raise ValueError(f"{name} is {tensor.tolist()[:8]}...; accepted are {_OFFSETS}")
    return tensor


def ids_of(offsets: torch.Tensor) -> torch.Tensor:
    """int32 (offsets[-1],): the number of the document of each token."""
    numbers = torch.arange(len(offsets) - 1, dtype=torch.int32, device=offsets.device)
    return torch.repeat_interleave(numbers, offsets.diff())


def _ids(
    name: str,
    ids: torch.Tensor | None,
    offsets_name: str,
    offsets: torch.Tensor | Sequence[int] | None,
) -> torch.Tensor | None:
    if ids is not None and offsets is not None:
        raise TypeError(f"{name} and {offsets_name} are both given; give one of them")
    if offsets is not None:
        return ids_of(checked_offsets(offsets_name, offsets))
    return None if ids is None else checked_integers(ids, name, (1, 2), _IDS)


def _token(ids: torch.Tensor, b: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return ids[index] if ids.dim() == 1 else ids[b, index]
