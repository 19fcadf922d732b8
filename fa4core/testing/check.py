"""One call against the float64 oracle.

`run` a call, `judge` its outputs, statistics and gradients by the rule of `tolerance`, or have both
done by `assert_case_correct`, which says on failure what is wrong, where, by how much, and how to
run it again. `whole` does it for all kinds of calls of a variant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fa4core.attention import attention
from fa4core.backends import choose
from fa4core.dispatch import place_of
from fa4core.plan.problem import Problem
from fa4core.plan.target import target
from fa4core.reference.oracle import oracle
from fa4core.testing.case import Case, Inputs
from fa4core.testing.dense import Outputs, plain
from fa4core.testing.magnitudes import sizes
from fa4core.testing.tolerance import Comparison, compare, exp_error, floor, report
from primitives.exp import Exp

Tensor = torch.Tensor

#: `attend(q, k, v, variant, layout=..., scale=...)` gives output, LSE and row maximum.
Attend = Callable[..., tuple[Tensor, Tensor, Tensor]]


def by_backend(backend: str = "auto", **options: Any) -> Attend:
    """`fa4core.attention` with all its outputs."""

    def attend(q, k, v, variant, *, layout, scale):
        return attention(
            q, k, v, variant, layout=layout, scale=scale, return_lse=True, return_row_max=True,
            backend=backend, **options,
        )  # fmt: skip

    return attend


def _plain(q, k, v, variant, *, layout, scale) -> tuple[Tensor, Tensor, Tensor]:
    outputs: Outputs = plain(q, k, v, variant, layout, scale=scale)
    return outputs.out, outputs.lse, outputs.row_max


def _oracle(q, k, v, variant, *, layout, scale) -> tuple[Tensor, Tensor, Tensor]:
    return oracle(q, k, v, variant, layout=layout, scale=scale)


def run(
    attend: Attend, inputs: Inputs, *, scale: float | None = None, backward: bool = True
) -> dict[str, Tensor]:
    """Outputs and gradients by name: "out", "lse", "row_max", "dq", "dk", "dv", "d0", "d1"...

    "d<i>" is the gradient of the i-th captured tensor that requires grad.
    """
    leaves = {"dq": inputs.q, "dk": inputs.k, "dv": inputs.v}
    leaves |= {f"d{i}": t for i, t in enumerate(inputs.learned)}
    with torch.set_grad_enabled(backward):
        out, lse, row_max = attend(
            inputs.q, inputs.k, inputs.v, inputs.variant, layout=inputs.layout, scale=scale
        )
    results = {"out": out.detach(), "lse": lse.detach(), "row_max": row_max.detach()}
    if backward:
        gradients = torch.autograd.grad(
            [out, lse],
            list(leaves.values()),
            [inputs.grad_out.to(out.dtype), inputs.grad_lse.to(lse.dtype)],
            allow_unused=True,
        )
        for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
            results[name] = torch.zeros_like(leaf) if gradient is None else gradient
    return results


def judge(
    results: dict[str, Tensor],
    inputs: Inputs,
    *,
    scale: float | None = None,
    exp: Exp | None = None,
) -> list[Comparison]:
    """Compare `results` (see `run`; any part of them) with oracle and plain torch.

    `exp` is the default policy of the kernel that computed them, None if none did.
    """
    backward = any(name.startswith("d") for name in results)
    expected = run(_oracle, inputs, scale=scale, backward=backward)
    yardstick = run(_plain, inputs, scale=scale, backward=backward)
    by_kernel, exp = exp is not None, inputs.variant.exp or exp
    size = sizes(
        inputs.q, inputs.k, inputs.v, inputs.variant, inputs.layout,
        inputs.grad_out, inputs.grad_lse, scale=scale, exp=exp if by_kernel else None,
    )  # fmt: skip
    longest = _longest_sum(Problem.from_tensors(inputs.q, inputs.k, inputs.v, inputs.layout))
    comparisons = []
    for name, given in results.items():
        statistic = name in ("lse", "row_max")
        allowed: Tensor | float = size.allowed.get(name, 0.0)
        if statistic:  # absolute errors, and the rounding of the number itself
            magnitude = 1.0 + torch.where(expected[name].isfinite(), expected[name].abs(), 0.0)
            dtype = given.dtype
            allowed = allowed + (exp_error(exp) if name == "lse" else 0.0)
        else:
            magnitude = size.magnitude[name] + longest * _flushed(name, inputs)
            dtype = _coarser(given.dtype, inputs.q.dtype)
        captured = name not in ("out", "lse", "row_max", "dq", "dk", "dv")
        least = floor(dtype, size.score, longest, None if statistic else exp, captured=captured)
        # Elements of a table may share all their roundings; which is not known here.
        row = 1 if statistic else max(1, given.numel()) if captured else given.shape[-1]
        comparisons.append(
            compare(name, given, expected[name], yardstick[name], magnitude, least, row, allowed)
        )
    return comparisons


def default_exp(backend: str, inputs: Inputs) -> Exp | None:
    """The exp policy of the kernels that a call takes, for variants that leave it open.

    It is the target's: with "emulator" that of the session that is open, so ask inside of it.

    Args:
        backend: As of `fa4core.attention`.
        inputs: Of the call.

    Returns:
        None if no kernel computes it.
    """
    problem = Problem.from_tensors(inputs.q, inputs.k, inputs.v, inputs.layout)
    chosen, _ = choose(backend, inputs.q.device, inputs.variant.program, problem)
    if chosen == "reference":
        return None
    of = target(place_of(chosen, inputs.q.device).target)
    return of.exp(max(problem.head_dim, problem.head_dim_v))


def _flushed(name: str, inputs: Inputs) -> float:
    """What a weight that underflows would have added to a result, at most, as a magnitude: limits
    are its multiples of a 16-bit type's rounding."""
    q, k, v, grad_out, grad_lse = (
        float(t.detach().double().nan_to_num(0.0).abs().amax()) if t.numel() else 0.0
        for t in (inputs.q, inputs.k, inputs.v, inputs.grad_out, inputs.grad_lse)
    )
    of_weight = 2 * inputs.v.shape[-1] * grad_out * v + grad_lse  # dP - delta
    other = {"out": v, "dv": grad_out, "dq": of_weight * k, "dk": of_weight * q}
    least = torch.finfo(torch.float32).smallest_normal / torch.finfo(torch.bfloat16).eps
    return least * other.get(name, of_weight)


def _longest_sum(problem: Problem) -> int:
    rows = max(problem.seqlens_q, default=0) * problem.group
    return max(rows, max(problem.seqlens_k, default=0), problem.head_dim)


def _coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return max(a, b, key=lambda dtype: torch.finfo(dtype).eps)


def assert_close_to_oracle(
    results: dict[str, Tensor],
    inputs: Inputs,
    *,
    scale: float | None = None,
    context: str = "",
    exp: Exp | None = None,
) -> None:
    """Raise `AssertionError` with a report unless all `results` are as good as they must be.

    Args:
        results: Any of "out", "lse", "row_max", "dq", "dk", "dv", "d<i>"; see `run`.
        inputs: What they were computed of.
        scale: Of the scores.
        context: Lines for the report: what was run, and how to run it again.
        exp: The default policy of the kernel that computed them (`default_exp`), None if none did.
    """
    comparisons = judge(results, inputs, scale=scale, exp=exp)
    if all(c.ok for c in comparisons):
        return
    raise AssertionError(
        f"further from the float64 oracle than allowed\n{report(comparisons)}\n{context}"
    )


def assert_case_correct(
    case: Case,
    *,
    backend: str = "auto",
    attend: Attend | None = None,
    backward: bool = True,
    scale: float | None = None,
) -> None:
    """Run a case and compare everything with the oracle.

    Args:
        case: What to run; see `fa4core.testing.strategies.cases`.
        backend: As `fa4core.attention`.
        attend: Instead of a backend, a function `attend(q, k, v, variant, layout=..., scale=...)`
            that returns output, LSE and row maximum and is differentiable.
        backward: Also the gradients, through the output and through the LSE.
        scale: Of the scores.

    Raises:
        AssertionError: With a report.
    """
    inputs = case.inputs()
    results = run(attend or by_backend(backend), inputs, scale=scale, backward=backward)
    again = f"again:\n  from fa4core.testing import *\n  assert_case_correct({case}"
    again += "" if backend == "auto" else f", backend={backend!r}"
    again += "" if scale is None else f", scale={scale}"
    exp = None if attend else default_exp(backend, inputs)
    assert_close_to_oracle(results, inputs, scale=scale, context=again + ")", exp=exp)
