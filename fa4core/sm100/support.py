"""What the SM100 forward kernel takes, and why not the rest. Imports no kernel and no DSL."""

from __future__ import annotations

import torch

from fa4core.plan.problem import Problem
from fa4core.program import Program
from fa4core.sm100.forward.spec import MAX_HEAD_DIM

_DTYPES = (torch.bfloat16, torch.float16)
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_CAPTURED = (*_DTYPES, torch.float32, torch.bool, *_INTEGERS)


def refusal(program: Program, problem: Problem) -> str | None:
    """Why the kernel can't run a program on a problem, or None if it can."""
    if problem.dtype not in _DTYPES:
        return f"the kernels take bfloat16 and float16, not {problem.dtype}; convert the inputs"
    for name, d in (("head dim", problem.head_dim), ("head dim of v", problem.head_dim_v)):
        if d % 8 or not 8 <= d <= MAX_HEAD_DIM:
            return f"{name} {d}; multiples of 8 from 8 to {MAX_HEAD_DIM} are supported"
    if problem.page_size is not None:
        return "paged keys are not supported yet"
    for capture in program.graph.captures:
        if capture.dtype not in _CAPTURED:
            return f"a captured tensor is {capture.dtype}; use float32 or a smaller type"
    return _schedule(program)


def _schedule(program: Program) -> str | None:
    s = program.schedule
    if s is None:
        return None
    if s.coordinates == "split_kv":
        return "schedule coordinates='split_kv' is not supported yet; use 'heads' or 'packed_gqa'"
    if s.order == "batch_sorted":
        return "schedule order='batch_sorted' is not supported yet; use 'longest_first'"
    return None


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Check what TMA asks of the tensors.

    Raises:
        ValueError: A stride or address is no multiple of 16 bytes.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        strides = [s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1]
        contiguous = t.stride(-1) == 1 or t.shape[-1] == 1
        if not contiguous or any(s % 8 or s == 0 for s in strides) or t.data_ptr() % 16:
            raise ValueError(
                f"{name} has strides {tuple(t.stride())}, address {t.data_ptr() % 16} modulo 16; "
                "TMA takes a last stride of 1 and others, and addresses, that are multiples of 16 "
                f"bytes and not 0: pass {name}.contiguous() or .clone()"
            )
