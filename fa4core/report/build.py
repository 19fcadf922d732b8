"""Compiles what the report reads: our forward kernel for a call, for any target, without a GPU."""

from __future__ import annotations

from fa4core.compile.artifact import Artifact
from fa4core.compile.cross import cross_compile
from fa4core.plan.problem import Problem
from fa4core.sm100.forward.spec import Spec
from fa4core.variant import Variant


def compile_ours(variant: Variant, problem: Problem, spec: Spec) -> Artifact:
    """The forward kernel of a `Spec`, compiled anew each time."""
    import torch

    from fa4core.sm100.forward import launch

    cutlass = launch.cutlass
    inputs = [torch.zeros(1, 1, 1, d, dtype=problem.dtype) for d in _dims(problem)]
    rows = torch.zeros(1, 1, 1)
    tables = [torch.zeros(1, n, dtype=torch.int32) for n in (13, 3)]
    captured = [launch._captured(c.tensor) for c in variant.program.graph.captures]
    return cross_compile(
        launch.forward,
        *(launch._view(t, 3) for t in inputs),
        *(launch._view(t, 2) for t in (rows, rows)),
        *(launch._view(t, 1) for t in tables),
        tuple(launch._view(t, t.dim() - 1, t.element_size()) for t in captured),
        cutlass.Float32(1.0),
        cutlass.Int32(1),
        spec,
        target=spec.target,
    ).artifact


def _dims(problem: Problem) -> tuple[int, int, int, int]:
    d, d_v = problem.head_dim, problem.head_dim_v
    return d, d, d_v, d_v
