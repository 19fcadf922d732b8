"""Which backends could run a call and which does, as values; `explain` shows them."""

from __future__ import annotations

import attrs
import torch

from fa4core.plan.problem import Problem
from fa4core.variant import Variant

BACKENDS = ("sm100", "sm90", "reference", "emulator")


@attrs.frozen
class Choice:
    """Whether one backend can run the call, and why (not)."""

    backend: str
    ok: bool
    reason: str


def paths_of(
    variant: Variant, problem: Problem, backend: str, device: torch.device
) -> tuple[Choice, tuple[Choice, ...]]:
    """What `backend` leads to, and what each backend could do."""
    from fa4core.backends import choose, supports

    answers = []
    for name in BACKENDS:
        support = supports(variant, problem, name, device)
        answers.append(Choice(name, support.ok, support.reason))
    paths = tuple(answers)
    try:
        name, why = choose(backend, device, variant.program, problem)
    except NotImplementedError as error:
        return Choice(backend, False, str(error)), paths
    possible = next(p for p in paths if p.backend == name)
    return Choice(name, possible.ok, why if possible.ok else possible.reason), paths


def gradients_of(chosen: Choice, variant: Variant, problem: Problem, backend: str) -> Choice:
    """What computes gradients where `chosen` computes the output."""
    from fa4core.backends import gradients_by

    if not chosen.ok:
        return chosen
    try:
        name, why = gradients_by(backend, chosen.backend, variant.program, problem)
    except NotImplementedError as error:
        return Choice(chosen.backend, False, str(error))
    return Choice(name, True, why)
