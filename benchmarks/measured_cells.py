"""What the benchmark of speed measures: a cell is a variant on a problem, in all languages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from fa4core import Variant
from primitives import mask, score
from primitives.sequence import Layout, varlen

HIDDEN = 2048  # heads times head dim, as in FlashAttention-4's protocol
TOKENS = 32_768  # batch times length
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without a GPU cells can be modelled

WINDOWS = (128, 1024, 4096)
DOCUMENT = 1000
VARIANTS = (
    "causal", "full", *(f"window {w}" for w in WINDOWS), "documents", "alibi", "softcap",
    "block sparse", "varlen",
)  # fmt: skip


@attrs.frozen
class Cell:
    """One problem: `seqlen` tokens in each of `TOKENS / seqlen` sequences, heads for `HIDDEN`."""

    variant: str
    head_dim: int
    seqlen: int

    def __str__(self) -> str:
        return f"{self.variant} d={self.head_dim} {self.seqlen}"

    @property
    def heads(self) -> int:
        return HIDDEN // self.head_dim

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Of packed sequences: one long, the rest short."""
        if self.variant != "varlen":
            return None
        short = 256
        return (self.seqlen, *[short] * ((TOKENS - self.seqlen) // short))

    def inputs(self, grad: bool = False) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        padded = (max(1, TOKENS // self.seqlen), self.seqlen)
        rows = (sum(self.lengths),) if self.lengths else padded
        size = (*rows, self.heads, self.head_dim)
        drawn = (torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
        return tuple(t.requires_grad_(grad) for t in drawn)

    def layout(self) -> Layout | None:
        if not self.lengths:
            return None
        ends = torch.tensor((0, *self.lengths)).cumsum(0).int().to(DEVICE)
        return varlen(ends, ends)


@attrs.frozen(eq=False)
class Meaning:
    """A variant as each contender takes it; None where one has no way to say it.

    Attributes:
        ours: The variant.
        fa4: Arguments of flash_attn_func.
        flex: (mask_mod, score_mod) of FlexAttention.
        sdpa: Whether causal, for scaled_dot_product_attention.
    """

    ours: Variant
    fa4: dict[str, Any] | None = None
    flex: tuple[Callable | None, Callable | None] | None = None
    sdpa: bool | None = None


def meaning(cell: Cell) -> Meaning:
    name = cell.variant
    if name == "full":
        return Meaning(Variant(), {}, None, False)
    causal = mask.causal()
    if name in ("causal", "varlen"):
        return Meaning(Variant(mask=causal), {"causal": True}, (_causal, None), True)
    if name.startswith("window"):
        width = int(name.split()[1])
        flex = (lambda b, h, q, k: (q >= k) & (q - k <= width), None)
        ours = Variant(mask=causal & mask.sliding_window(width, 0))
        return Meaning(ours, {"causal": True, "window_size": (width, 0)}, flex)
    if name == "softcap":
        capped = lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0)  # noqa: E731
        ours = Variant(mask=causal, score=score.softcap(30.0))
        return Meaning(ours, {"causal": True, "softcap": 30.0}, (_causal, capped))
    if name == "alibi":
        slopes = 2.0 ** -(8 * torch.arange(1, cell.heads + 1, device=DEVICE) / cell.heads)
        biased = lambda s, b, h, q, k: s + slopes[h] * (k - q)  # noqa: E731
        return Meaning(Variant(mask=causal, score=score.alibi(slopes)), None, (_causal, biased))
    if name == "documents":
        ids = torch.arange(cell.seqlen, device=DEVICE, dtype=torch.int32) // DOCUMENT
        same = lambda b, h, q, k: (q >= k) & (ids[q] == ids[k])  # noqa: E731
        return Meaning(Variant(mask=causal & mask.document(ids)), None, (same, None))
    if name == "block sparse":
        kept = _blocks(cell)
        sparse = lambda b, h, q, k: (q >= k) & kept[q // 128, k // 128]  # noqa: E731
        ours = Variant(mask=causal & mask.define(lambda b, h, q, k: kept[q // 128, k // 128]))
        return Meaning(ours, None, (sparse, None))
    raise ValueError(f"variant {name!r}; known are {', '.join(VARIANTS)}")


def _causal(b, h, q, k):
    return q >= k


def _blocks(cell: Cell) -> torch.Tensor:
    """Of every block of 128 queries, 8 random blocks of keys before it, and its own."""
    n = cell.seqlen // 128
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(n, n, generator=generator).tril(-1)
    kept = torch.zeros(n, n, dtype=torch.bool)
    kept.scatter_(1, weights.topk(min(8, n), dim=1).indices, True)
    return ((kept & (weights > 0)) | torch.eye(n, dtype=torch.bool)).to(DEVICE)
