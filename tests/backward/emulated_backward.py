"""Runs the backward kernels on cases of the testing kit, in the emulator with every detector on.

The forward pass is the reference's, so that what is judged is the backward pass alone, and only its
kernels are compiled and run.
"""

from __future__ import annotations

import torch

from fa4core.dispatch import BACKWARD
from fa4core.emulator.session import emulator
from fa4core.ops import differentiated
from fa4core.testing import Case, LayoutSpec, Shape, assert_close_to_oracle
from fa4core.testing.case import Inputs

FIXED = LayoutSpec()
TARGETS = tuple(BACKWARD)
FIELDS = (
    "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table", "max_seqlen_q",
    "max_seqlen_k",
)  # fmt: skip


def gradients(
    inputs: Inputs,
    *,
    scale: float | None = None,
    deterministic: bool = False,
    with_lse: bool = True,
    backend: str = "emulator",
) -> dict[str, torch.Tensor]:
    """Gradients by name, as `fa4core.testing.run` gives them; `with_lse`: also through the LSE."""
    variant = inputs.variant
    qkv = [t.detach() for t in (inputs.q, inputs.k, inputs.v)]
    layout = [None if inputs.layout is None else getattr(inputs.layout, n) for n in FIELDS]
    rest = (variant.arguments, *layout, variant.spec, scale)
    with torch.no_grad():
        out, lse, _ = torch.ops.fa4core.forward(*qkv, *rest, "reference", False)
        upstream = inputs.grad_out.to(out.dtype), inputs.grad_lse if with_lse else None
        *of_qkv, of_captured = torch.ops.fa4core.backward(
            *upstream, *qkv, out, lse, *rest, backend, deterministic
        )
    by_tensor = {
        id(variant.arguments[slot]): gradient
        for slot, gradient in zip(differentiated(variant.spec), of_captured, strict=True)
    }
    found = dict(zip(("dq", "dk", "dv"), of_qkv, strict=True))
    return found | {
        f"d{i}": by_tensor.get(id(t), torch.zeros_like(t)) for i, t in enumerate(inputs.learned)
    }


def execute(
    target: str, variant: str, shape: Shape, layout: LayoutSpec = FIXED, *,
    dtype: str = "bfloat16", seed: int = 0, num_sms: int = 2, scale: float | None = None,
    deterministic: bool = False, **rest,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Compare all gradients with those of the oracle; gives them."""
    case = Case(variant, shape, layout, dtype=dtype, seed=seed, **rest)
    inputs = case.inputs()
    with emulator(target, seed, num_sms=num_sms, record=False):
        results = gradients(inputs, scale=scale, deterministic=deterministic)
    assert_close_to_oracle(results, inputs, scale=scale, context=f"{target}: {case}")
    return results
