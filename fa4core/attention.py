"""`attention`: the public entry point."""

from __future__ import annotations

import torch

from fa4core.reference.oracle import oracle
from fa4core.variant import Variant
from primitives.sequence import Layout


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant | None = None,
    *,
    layout: Layout | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    return_row_max: bool = False,
    backend: str = "auto",
    deterministic: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attention with a variant (provisional: by the dense oracle, until the tiled reference)."""
    out, lse, row_max = oracle(q, k, v, variant, layout=layout, scale=scale)
    exact = q.dtype if q.dtype == torch.float64 else torch.float32
    results = [out.to(q.dtype)]
    if return_lse:
        results.append(lse.to(exact))
    if return_row_max:
        results.append(row_max.to(exact))
    return results[0] if len(results) == 1 else tuple(results)
