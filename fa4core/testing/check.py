"""Checks in one line: a call, or a whole variant, against the float64 oracle.

`assert_variant_correct` is what users of a variant need, `assert_case_correct` what property tests
need; both compare outputs, statistics and all gradients by the rule of `tolerance`, and say on
failure what is wrong, where, by how much, and how to run it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from fa4core.attention import attention
from fa4core.backends import choose
from fa4core.dispatch import place_of
from fa4core.plan.problem import Problem
from fa4core.plan.target import target
from fa4core.reference.oracle import oracle
from fa4core.testing.case import Case, Inputs, LayoutSpec, Shape
from fa4core.testing.dense import Outputs, plain
from fa4core.testing.magnitudes import sizes
from fa4core.testing.tolerance import Comparison, compare, exp_error, floor, report
from fa4core.variant import Variant
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


#: Layouts that `assert_variant_correct` tries.
LAYOUTS = (LayoutSpec(), LayoutSpec("varlen"), LayoutSpec("seqused", slack=3), LayoutSpec("paged"))


def shapes_up_to(
    *, batch: int = 2, heads_q: int = 4, heads_kv: int = 2, max_seqlen: int = 200
) -> tuple[Shape, ...]:
    """A few telling shapes: one element, tile edges, ragged, more queries than keys, no keys."""
    pairs = [(1, 1), (64, 64), (65, 130), (130, 63), (129, 200), (7, 128), (5, 0)]
    pairs = [(min(m, max_seqlen), min(n, max_seqlen)) for m, n in pairs]
    dims = [(64, 64), (8, 8), (64, 32), (40, 40), (128, 64)]
    rows = []
    for i in range(0, len(pairs), batch):
        lengths = (pairs[i : i + batch] * batch)[:batch]
        seqlens_q, seqlens_k = zip(*lengths, strict=True)
        rows.append(Shape(seqlens_q, seqlens_k, heads_q, heads_kv, *dims[i // batch % len(dims)]))
    return tuple(dict.fromkeys(rows))


def assert_variant_correct(
    variant: Variant | Callable[[Shape], Variant],
    *,
    shapes: Sequence[Shape] | None = None,
    layouts: Sequence[LayoutSpec] = LAYOUTS,
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16"),
    backend: str = "auto",
    backward: bool = True,
    tile_map: bool = True,
    scale: float | None = None,
    seed: int = 0,
) -> None:
    """Check a variant: forward, backward and tile map, over shapes, layouts and dtypes.

    Each shape runs in each layout, with the dtypes in turn; every combination that is not run
    shares its shape, its layout and its dtype with some that are.

    Args:
        variant: To be checked; a function of the shape if its tables depend on it.
        shapes: Default `shapes_up_to()`, two sequences of at most 200 and four query heads. Choose
            your own if the variant's tables are smaller: `shapes_up_to(heads_q=2, heads_kv=1)`.
        layouts: How sequences lie. Shapes with sequences of several lengths run padded with
            `seqused` where "fixed" is asked for.
        dtypes: Of queries, keys and values.
        backend: As `fa4core.attention`.
        backward: Also all gradients.
        tile_map: Also the soundness of the tile map; see `check_tile_map`.
        scale: Of the scores.
        seed: Of the data.

    Raises:
        AssertionError: With a report of everything that is wrong.
        IndexError: The variant's tables are too small for `shapes`.
    """
    from fa4core.testing.tilemap import check_tile_map

    shapes = shapes_up_to() if shapes is None else shapes
    failures: list[str] = []
    cases = 0
    for i, shape in enumerate(shapes):
        chosen = variant if isinstance(variant, Variant) else variant(shape)
        for j, given in enumerate(layouts):
            ragged = given.kind == "fixed" and not shape.is_uniform
            layout = attrs.evolve(given, kind="seqused") if ragged else given
            dtype = dtypes[(i + j) % len(dtypes)]
            case = Case("...", shape, layout, dtype=dtype, seed=seed)
            failures += _failures(case, chosen, backend, backward, scale)
            cases += 1
        if tile_map:
            found = check_tile_map(
                chosen, heads=shape.heads_q, seqlens_q=shape.seqlens_q, seqlens_k=shape.seqlens_k
            )
            failures += [] if found.sound else [f"{shape}\n  {found}"]
    if failures:
        raise AssertionError(
            f"{len(failures)} of {cases} calls of {chosen.mask!r}, {chosen.score!r} are wrong:\n"
            + "\n".join(failures)
        )


def _failures(
    case: Case, variant: Variant, backend: str, backward: bool, scale: float | None
) -> list[str]:
    inputs = case.inputs(variant)
    try:
        results = run(by_backend(backend), inputs, scale=scale, backward=backward)
    except IndexError as error:
        raise IndexError(
            f"{error}\nThe variant was run with {case.shape}; give `shapes` that its tables serve "
            "(see `shapes_up_to`), or pass a function that makes the variant of a shape"
        ) from error
    comparisons = judge(results, inputs, scale=scale, exp=default_exp(backend, inputs))
    if all(c.ok for c in comparisons):
        return []
    again = (
        f"assert_variant_correct(variant, shapes=[{case.shape}], layouts=[{case.layout}], "
        f"dtypes=[{case.dtype!r}], backend={backend!r})"
    )
    return [f"{case.shape} {case.layout} {case.dtype}\n{report(comparisons)}\n  again: {again}"]
