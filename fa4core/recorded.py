"""`Recorded`: a prepared call as a node of autograd's graph.

What autograd needs is the operator's (`fa4core.ops`); only the way there is shorter: recording a
custom operator that is written in Python takes torch ten times as long as recording this.
"""

from __future__ import annotations

from typing import Any

import torch

from fa4core.ops import gradients, save
from fa4core.prepared import Prepared, Results

Tensor = torch.Tensor


class Recorded(torch.autograd.Function):
    """`apply(prepared, with_max, options, q, k, v, *captured)` gives output, LSE and row maximum.

    `options` are the forward operator's arguments after the captured tensors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        prepared: Prepared,
        with_max: bool,
        options: tuple,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *captured: Tensor,
    ) -> Results:
        results = prepared(q, k, v, True, with_max)
        save(ctx, (q, k, v, captured, *options), results)
        ctx.originals = captured  # a checkpoint gives others back, and prepared calls go by these
        return results

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, grad_max: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        grads = grad_out, grad_lse, grad_max
        grad_q, grad_k, grad_v, of_captured, *_ = gradients(ctx, *grads, originals=ctx.originals)
        return None, None, None, grad_q, grad_k, grad_v, *of_captured
