"""A rich variant, ragged lengths and plain tensors that the tests of kinds share."""

from __future__ import annotations

import torch

from fa4core.testing import Shape

RAGGED = Shape((65, 3, 130), (129, 70, 64), 4, 2, 16, 24)
RICH = (
    "Variant(mask=mask.causal() & mask.sliding_window(70) | mask.sink_tokens(3), "
    "score=score.alibi(normal(0, 4, std=0.1)) >> score.softcap(15.0), "
    "sink=sink.learned(normal(1, 4)))"
)


def tensors(seqlen_q=70, seqlen_k=70, heads_q=2, heads_kv=2, d=16, batch=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(seqlen_q, heads_q), (seqlen_k, heads_kv), (seqlen_k, heads_kv)]
    return [torch.randn(batch, n, h, d, generator=generator).requires_grad_() for n, h in shapes]


def gradients(out, *leaves):
    return torch.autograd.grad(out, leaves, torch.ones_like(out))
