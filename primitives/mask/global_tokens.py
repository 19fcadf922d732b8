"""Global tokens: they see every token and every token sees them (Longformer, BigBird)."""

from __future__ import annotations

import torch

from primitives.arguments import shown, width
from primitives.mask.core import Mask, named


def global_tokens(tokens: int | torch.Tensor) -> Mask:
    """Global tokens attend to everything and everything attends to them.

    Usually joined to a window: `sliding_window(256, 256) | global_tokens(is_global)`
    (Longformer, arXiv:2004.05150, section 3.1; BigBird, arXiv:2007.14062).

    Args:
        tokens: bool (seqlen,) or (batch, seqlen), which tokens are global; or an int (or a 0-d
            integer tensor): the first so many. Run-time.

    Raises:
        TypeError, ValueError: Another dtype or shape, or a negative number.
    """
    if isinstance(tokens, torch.Tensor) and tokens.dtype == torch.bool:
        table = tokens
        if table.dim() not in (1, 2):
            raise ValueError(
                f"tokens has shape {tuple(table.shape)}; bool (seqlen,) or (batch, seqlen), or a "
                "number of leading tokens is accepted"
            )

        def token(b: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return table[index] if table.dim() == 1 else table[b, index]

        return named(
            f"global_tokens({shown(table)})",
            lambda b, h, q_idx, kv_idx: token(b, q_idx) | token(b, kv_idx),
        )
    count = width(tokens, "tokens")
    if count.dim():
        raise TypeError(
            f"tokens is a {count.dtype} tensor of shape {tuple(count.shape)}; bool (seqlen,) or "
            "(batch, seqlen), or a number of leading tokens is accepted"
        )
    return named(
        f"global_tokens({shown(tokens)})",
        lambda b, h, q_idx, kv_idx: (q_idx < count) | (kv_idx < count),
    )
