"""Runs the backward kernels on cases of the testing kit: those of Hopper on a GPU of that kind if
this machine has one, all others in the emulator with every detector on.

The forward pass is the reference's, so that what is judged is the backward pass alone, and only its
kernels are compiled and run.
"""

from __future__ import annotations

import contextlib

import torch
from hopper_gpu import GPU, on_gpu

from fa4core.dispatch import BACKWARD
from fa4core.emulator.session import current_session, emulator
from fa4core.ops import differentiated
from fa4core.testing import Case, LayoutSpec, Shape, assert_close_to_oracle
from fa4core.testing.case import Inputs

FIXED = LayoutSpec()
TARGETS = tuple(BACKWARD)
FIELDS = (
    "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table", "max_seqlen_q",
    "max_seqlen_k",
)  # fmt: skip


def machine(
    target: str, seed: int = 0, *, num_sms: int = 2
) -> contextlib.AbstractContextManager[object]:
    """Where the kernels of `target` run; seed and number of SMs are the emulator's."""
    if GPU and target == "sm90":
        return contextlib.nullcontext()
    return emulator(target, seed, num_sms=num_sms, record=False)


def gradients(
    inputs: Inputs,
    *,
    scale: float | None = None,
    deterministic: bool = False,
    with_lse: bool = True,
) -> dict[str, torch.Tensor]:
    """Gradients by name, as `fa4core.testing.run` gives them; `with_lse`: also through the LSE.

    To be called on a `machine`.
    """
    variant = inputs.variant
    qkv = [t.detach() for t in (inputs.q, inputs.k, inputs.v)]
    layout = [None if inputs.layout is None else getattr(inputs.layout, n) for n in FIELDS]
    rest = (variant.arguments, *layout, variant.spec, scale)
    backend, there = ("sm90", on_gpu) if current_session() is None else ("emulator", lambda t: t)
    with torch.no_grad():
        out, lse, _ = torch.ops.fa4core.forward(*qkv, *rest, "reference", False)
        given = inputs.grad_out.to(out.dtype), inputs.grad_lse if with_lse else None, *qkv, out, lse
        *of_qkv, of_captured = torch.ops.fa4core.backward(
            *map(there, given), *map(there, rest), backend, deterministic
        )
    by_tensor = {
        id(variant.arguments[slot]): gradient.cpu()
        for slot, gradient in zip(differentiated(variant.spec), of_captured, strict=True)
    }
    found = {n: t.cpu() for n, t in zip(("dq", "dk", "dv"), of_qkv, strict=True)}
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
    with machine(target, seed, num_sms=num_sms):
        results = gradients(inputs, scale=scale, deterministic=deterministic)
    assert_close_to_oracle(results, inputs, scale=scale, context=f"{target}: {case}")
    return results
