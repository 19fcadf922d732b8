"""Tree masks: drafts of speculative decoding, verified in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from primitives.arguments import checked_integers
from primitives.mask.core import Mask, named

_FORMS = (
    "parents, integers of shape (nodes,) or (batch, nodes), or ancestors, bool of shape "
    "(nodes, nodes) or (batch, nodes, nodes)"
)


def tree(nodes: torch.Tensor | Sequence[int]) -> Mask:
    """A node attends to the whole context and to its own path to the root.

    The queries are the nodes of the tree; the keys are the context followed by the nodes, so that
    the context's length is `seqlen_k - seqlen_q` (SpecInfer, arXiv:2305.09781; Medusa,
    arXiv:2401.10774).

    Args:
        nodes: Either the parent of each node, (nodes,) or (batch, nodes), -1 for a root, parents
            before their children; or `ancestors[..., i, j]`, bool (nodes, nodes) or
            (batch, nodes, nodes), true if node j is on the path of node i, itself included.

    Raises:
        TypeError, ValueError: Another form, or a parent that doesn't come before its child.
    """
    given = torch.as_tensor(nodes)
    if given.dtype == torch.bool:
        if given.dim() not in (2, 3) or given.shape[-1] != given.shape[-2]:
            raise ValueError(f"nodes is bool of shape {tuple(given.shape)}; accepted are {_FORMS}")
        path = given
    else:
        checked_integers(given, "nodes", (1, 2), _FORMS)
        path = ancestors(given)

    def tree_mask(b, h, q_idx, kv_idx, *, seqlen_q, seqlen_k):
        node = kv_idx - (seqlen_k - seqlen_q)
        inside = node.clamp(min=0)  # of a key in the context: any node, its entry isn't used
        on_path = path[q_idx, inside] if path.dim() == 2 else path[b, q_idx, inside]
        return (node < 0) | on_path

    return named(f"tree({path.shape[-1]} nodes)", tree_mask)


def ancestors(parents: torch.Tensor) -> torch.Tensor:
    """The ancestor matrix of trees given by parents.

    Args:
        parents: integer (..., nodes): the parent of each node, -1 for a root.

    Returns:
        bool (..., nodes, nodes): entry [i, j] is true if j is i or an ancestor of i.

    Raises:
        ValueError: A parent that doesn't come before its child.
    """
    count = parents.shape[-1]
    flat = parents.reshape(-1, count).cpu()
    late = (flat >= torch.arange(count)) | (flat < -1)
    if bool(late.any()):
        node = int(late.nonzero()[0, 1])
        raise ValueError(
            f"the parent of node {node} is {int(flat[late][0])}; -1 or an earlier node is accepted"
        )
    matrix = torch.eye(count, dtype=torch.bool).repeat(len(flat), 1, 1)
    rows = torch.arange(len(flat))
    for node in range(count):
        parent = flat[:, node]
        matrix[:, node] |= matrix[rows, parent] & (parent >= 0)[:, None]
    return matrix.reshape(*parents.shape, count).to(parents.device)
