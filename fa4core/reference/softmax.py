"""Online softmax in the log2 domain, with lazy rescaling, and the merging of partial results.

FlashAttention-4, section 3.1: the accumulator is rescaled only when a row's maximum has grown by
more than a threshold; the final normalisation uses the maximum that was applied. Used by the tiled
reference's forward pass.
"""

from __future__ import annotations

import math

import attrs
import torch

from fa4core.reference.exp2 import exp2
from primitives.exp import Exp

Tensor = torch.Tensor
NEVER = -float("inf")
LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


@attrs.frozen(eq=False)
class Partial:
    """A normalised result over some of the keys; all natural units.

    Attributes:
        out: (n, rows, d_v); 0 for rows with nothing to attend to.
        lse: (n, rows); -inf for those.
        row_max: (n, rows); -inf for those.
    """

    out: Tensor
    lse: Tensor
    row_max: Tensor


@attrs.define(eq=False)
class OnlineSoftmax:
    """Running statistics of a set of rows.

    Attributes:
        exp: How exponentials are computed.
        threshold: Growth of a row's maximum, in the log2 domain, that is left unapplied.
        rounded: P is rounded to this dtype before it meets V, as tensor cores take it.
        out: (n, rows, d_v) accumulator, relative to `applied`.
        total: (n, rows) sum of exponentials, relative to `applied`.
        applied: (n, rows) the maximum that `out` and `total` are relative to.
        highest: (n, rows) the true maximum.
    """

    exp: Exp
    threshold: float
    rounded: torch.dtype
    out: Tensor
    total: Tensor
    applied: Tensor
    highest: Tensor

    @classmethod
    def start(
        cls,
        shape: tuple[int, int, int],
        like: Tensor,
        exp: Exp,
        threshold: float,
        rounded: torch.dtype,
    ) -> OnlineSoftmax:
        """No key seen yet; `shape` is (n, rows, d_v), dtype and device are those of `like`."""
        rows = shape[:2]
        return cls(
            exp,
            threshold,
            rounded,
            like.new_zeros(shape),
            like.new_zeros(rows),
            like.new_full(rows, NEVER),
            like.new_full(rows, NEVER),
        )

    def update(self, scores: Tensor, values: Tensor, keys: Tensor) -> None:
        """Take in a block of keys.

        Args:
            scores: (n, rows, w) modified scores in the log2 domain, -inf where masked. Overwritten.
            values: (n, w, d_v).
            keys: (w,) key indices, for the exp policy.
        """
        self.highest = torch.maximum(self.highest, scores.amax(-1))
        grown = self.highest - self.applied > self.threshold  # false for -inf - -inf
        if bool(grown.any()):
            applied = torch.where(grown, self.highest, self.applied)
            shrink = torch.where(grown, torch.exp2(self.applied - applied), 1.0)
            self.out *= shrink[..., None]
            self.total *= shrink
            self.applied = applied
        shift = torch.where(self.applied == NEVER, 0.0, self.applied)
        weights = exp2(scores.sub_(shift[..., None]), self.exp, keys)
        self.total += weights.sum(-1)
        self.out.baddbmm_(weights.to(self.rounded).to(values.dtype), values)

    def finish(self) -> Partial:
        empty = self.total == 0.0  # not `applied == NEVER`: that holds if all scores are NaN, too
        total = torch.where(empty, 1.0, self.total)
        return Partial(
            self.out / total[..., None],
            (self.applied + torch.log2(total)) * LN2,
            self.highest * LN2,
        )


def combine(parts: list[Partial]) -> Partial:
    """Merge results over disjoint sets of keys, by their log-sum-exp."""
    if len(parts) == 1:
        return parts[0]
    lse = torch.logsumexp(torch.stack([p.lse for p in parts]), 0)
    row_max = torch.stack([p.row_max for p in parts]).amax(0)
    out = sum(p.out * _ratio(p.lse, lse)[..., None] for p in parts)
    assert isinstance(out, Tensor)
    return Partial(out, lse, row_max)


def join_sink(part: Partial, sink: Tensor) -> Partial:
    """Add one more logit to the denominator; `sink` broadcasts to (n, rows)."""
    lse = torch.logaddexp(part.lse, sink.expand(part.lse.shape))
    return Partial(part.out * _ratio(part.lse, lse)[..., None], lse, part.row_max)


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole), 0 where part is -inf (also of an empty whole)."""
    return torch.where(part == NEVER, 0.0, torch.exp(part - whole))
