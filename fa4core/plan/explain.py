"""`explain`: everything about one call that a user may want to know before running it.

Collects the plan, the path and why, tiles by kind, findings, roofline and modelled cost in one
frozen value; `report` renders it, `draw` draws it. `Variant.explain` and the command line call it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch

from fa4core.plan import findings, makespan
from fa4core.plan.findings import EmptyRows, Flattened, OutOfRange
from fa4core.plan.makespan import Estimate
from fa4core.plan.paths import Choice, gradients_of, paths_of
from fa4core.plan.plan import Plan
from fa4core.plan.problem import Problem
from fa4core.plan.roofline import Terms
from fa4core.plan.strides import stride_class
from fa4core.plan.target import SM100, Target, of_capability, target
from fa4core.plan.tiles import EMPTY, FULL, PARTIAL
from fa4core.variant import Variant
from primitives.expr import Capture, captures
from primitives.sequence import Layout

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console, ConsoleOptions, RenderResult

KERNEL_DTYPES = (torch.float16, torch.bfloat16)


@attrs.frozen(eq=False)
class Explanation:
    """What a call will do. `print` it, `rich.print` it, or `draw` it.

    Costs are modelled, never measured.

    Attributes:
        plan: Tiles, numerics, schedule and compile key.
        chosen: The path that `backend` leads to.
        paths: Every backend, and whether it could.
        gradients: What computes gradients.
        tiles: Pairs of (query tile, key tile) by kind: EMPTY, PARTIAL, FULL.
        empty_rows: Rows with nothing to attend to.
        out_of_range: Captured tensors that may be indexed outside.
        flattened: Score mods that level out what the ones before them do.
        copies: Why an input has to be copied before a kernel can read it, by name.
        arguments: What the kernel takes at run time: (name, what).
        roofline: (pass, kind of block, cycles of each unit); empty without a cost model.
        forward: Modelled time with each schedule; empty without a cost model.
        backward: Likewise.
        warnings: What probably was not meant; first of all, that the call would fail.
    """

    plan: Plan
    chosen: Choice
    paths: tuple[Choice, ...]
    gradients: Choice
    tiles: dict[int, int]
    empty_rows: EmptyRows
    out_of_range: tuple[OutOfRange, ...]
    flattened: tuple[Flattened, ...]
    copies: dict[str, str]
    arguments: tuple[tuple[str, str], ...]
    roofline: tuple[tuple[str, str, Terms], ...]
    forward: tuple[Estimate, ...]
    backward: tuple[Estimate, ...]
    warnings: tuple[str, ...]

    @property
    def variant(self) -> Variant:
        return self.plan.variant

    @property
    def problem(self) -> Problem:
        return self.plan.problem

    @property
    def target(self) -> Target:
        return self.plan.target

    @property
    def skipped(self) -> float:
        """Share of the tile pairs that are EMPTY and cost nothing."""
        total = sum(self.tiles.values())
        return self.tiles[EMPTY] / total if total else 0.0

    @property
    def best(self) -> Estimate | None:
        """The modelled forward pass with the plan's schedule."""
        return next((e for e in self.forward if e.schedule == self.plan.schedule), None)

    def draw(self, path: str | Path | None = None, *, sequence: int = 0, head: int = 0) -> Figure:
        """Draw tile map, mask and score mod; see `fa4core.draw.variant`."""
        from fa4core import draw

        shape = self.plan.forward_tile
        return draw.variant(
            self.variant,
            path,
            problem=self.problem,
            sequence=sequence,
            head=head,
            tile=(shape.q, shape.k),
        )

    def __str__(self) -> str:
        from fa4core.plan.report import plain

        return plain(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from fa4core.plan.report import renderables

        yield from renderables(self)


def explain(
    variant: Variant,
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    problem: Problem | None = None,
    layout: Layout | None = None,
    target: str | Target | None = None,
    backend: str = "auto",
) -> Explanation:
    """Explain what an attention call will do, without running or compiling anything.

    Args:
        variant: The variant.
        q: As for `attention`; give q, k and v, or `problem`.
        k: As for `attention`.
        v: As for `attention`.
        problem: Sizes, where there are no tensors.
        layout: As for `attention`.
        target: What tiles and costs are for: "sm100", "sm103", "sm90" or "cpu". By default the
            GPU that the tensors are on, or else "sm100".
        backend: As for `attention`.

    Raises:
        TypeError, ValueError: As for `attention`, and for an unknown target or backend.
    """
    if (q is None) == (problem is None):
        raise TypeError("explain takes either q, k and v, or problem=Problem(...)")
    tensors: dict[str, torch.Tensor] = {}
    if q is not None:
        if k is None or v is None:
            raise TypeError("explain got q without k and v; give all three")
        tensors = {"q": q, "k": k, "v": v}
        problem = Problem.from_tensors(q, k, v, layout)
    elif layout is not None:
        raise TypeError("a layout goes with q, k and v; a Problem already has its lengths")
    assert problem is not None
    device = q.device if q is not None else torch.device("cpu")
    classes = tuple(stride_class(t, queries=n == "q") for n, t in tensors.items())
    plan = Plan(variant, problem, _target(target, device), classes)
    chosen, paths = paths_of(variant, problem, backend, device)
    gradients = gradients_of(chosen, variant, problem, backend)
    return _collect(plan, chosen, paths, gradients, tensors, layout)


def _target(given: str | Target | None, device: torch.device) -> Target:
    if given is not None:
        return target(given)
    if device.type == "cuda" and torch.cuda.is_available():
        return of_capability(*torch.cuda.get_device_capability(device)) or SM100
    return SM100


def _collect(
    plan: Plan,
    chosen: Choice,
    paths: tuple[Choice, ...],
    gradients: Choice,
    tensors: dict[str, torch.Tensor],
    layout: Layout | None,
) -> Explanation:
    variant, problem = plan.variant, plan.problem
    outside = tuple(findings.out_of_range(variant, problem))
    # What leaves its tables can't be evaluated; bounds alone classify the tiles of such a mask.
    unsafe = {o.where for o in outside}
    budget = 0 if "mask" in unsafe else findings.BUDGET
    rows = findings.empty_rows(variant.graph.mask, plan.tiles, budget)
    flattened = [] if unsafe else findings.flattened(variant, problem)
    modelled = plan.target.rates is not None
    explanation = Explanation(
        plan=plan,
        chosen=chosen,
        paths=paths,
        gradients=gradients,
        tiles=plan.tiles.counts(),
        empty_rows=rows,
        out_of_range=outside,
        flattened=tuple(flattened),
        copies=findings.copies(tensors),
        arguments=_arguments(variant, tensors, layout),
        roofline=_roofline(plan) if modelled else (),
        forward=tuple(plan.estimates()) if modelled else (),
        backward=tuple(plan.estimates(backward=True)) if modelled else (),
        warnings=(),
    )
    return attrs.evolve(explanation, warnings=_warnings(explanation, tensors))


def _roofline(plan: Plan) -> tuple[tuple[str, str, Terms], ...]:
    return tuple(
        (name, kind, plan.roofline(value, backward=name == "backward"))
        for name in ("forward", "backward")
        for kind, value in (("FULL", FULL), ("PARTIAL", PARTIAL))
    )


def _arguments(
    variant: Variant, tensors: dict[str, torch.Tensor], layout: Layout | None
) -> tuple[tuple[str, str], ...]:
    listed = [(name, _describe(t)) for name, t in tensors.items()]
    used = {
        part: set(captures(root))
        for part, root in zip(("mask", "score mod", "sink"), variant.graph.roots, strict=True)
    }
    for capture in variant.graph.captures:
        where = " and ".join(part for part, members in used.items() if capture in members)
        listed.append((f"captured by the {where}", _captured(capture)))
    if layout is not None:
        listed += [(name, _describe(t)) for name, t in layout.tensors.items()]
    return tuple(listed)


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _captured(capture: Capture) -> str:
    if capture.is_scalar and capture.tensor is not None:
        return f"{capture.signature.removesuffix('[0]')} scalar, now {capture.tensor.item()}"
    gradient = capture.tensor is not None and capture.tensor.requires_grad
    shape = "" if capture.tensor is None else f" {tuple(capture.tensor.shape)}"
    dtype = str(capture.dtype).removeprefix("torch.")
    return f"{dtype}{shape}{', receives a gradient' if gradient else ''}"


# --------------------------------------------------------------------------------- warnings


def _warnings(explanation: Explanation, tensors: dict[str, torch.Tensor]) -> tuple[str, ...]:
    variant, rows = explanation.variant, explanation.empty_rows
    chosen = explanation.chosen
    found = [] if chosen.ok else [f"This call would fail: {chosen.reason}"]
    found += [f"Possibly outside: {o}." for o in explanation.out_of_range]
    if rows.at_least:
        sink = ", LSE = the sink" if variant.sink is not None else ", LSE = -inf"
        example = "" if rows.example is None else ", e.g. sequence {}, head {}, query {}".format(
            *rows.example
        )  # fmt: skip
        found.append(f"{rows} rows have nothing to attend to (O = 0{sink}){example}.")
    total = sum(explanation.tiles.values())
    if total and explanation.tiles[EMPTY] == total:
        found.append("The mask attends to nothing at all.")
    trivial = variant.graph.mask.is_const or max(explanation.problem.seqlens_q, default=0) == 1
    if total and explanation.tiles[FULL] == total and not trivial:
        found.append("The mask attends to everything here: at these sizes it has no effect.")
    found += [f"{f}." for f in explanation.flattened]
    if findings.masks_through_scores(variant.graph.score):
        found.append(
            "The score mod can return -inf, which masks without skipping tiles; "
            "say it with a mask instead."
        )
    found += [
        f"{name} is copied before a kernel reads it: {reason}."
        for name, reason in explanation.copies.items()
    ]
    found += _device_warnings(variant, tensors)
    found += _schedule_warning(explanation)
    if explanation.forward and explanation.problem.dtype not in KERNEL_DTYPES:
        found.append(
            f"Kernels take float16 and bfloat16; the costs are theirs, not those of "
            f"{str(explanation.problem.dtype).removeprefix('torch.')}."
        )
    return tuple(found)


def _device_warnings(variant: Variant, tensors: dict[str, torch.Tensor]) -> list[str]:
    if "q" not in tensors:
        return []
    device = tensors["q"].device
    return [
        f"A captured tensor {_captured(c)} is on {c.tensor.device}, q on {device}."
        for c in variant.graph.captures
        if c.tensor is not None and not c.is_scalar and c.tensor.device != device
    ]


def _schedule_warning(explanation: Explanation) -> list[str]:
    """Where the variant's own schedule is slower than another, by more than the model's error."""
    given, chosen = explanation.best, explanation.variant.schedule
    if chosen is None or not explanation.forward:
        return []
    if given is None:
        return [
            f"The variant's schedule, {chosen.coordinates}, does not apply: there is one query "
            "head for each KV head, so none to pack."
        ]
    fastest = makespan.best(explanation.forward)
    if given.seconds <= 1.05 * fastest.seconds:
        return []
    s = fastest.schedule
    return [
        f"The variant's schedule is modelled {given.seconds / fastest.seconds - 1:.0%} slower "
        f"than {s.coordinates}, {s.source}, {s.order}."
    ]
