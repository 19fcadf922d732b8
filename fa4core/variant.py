"""`Variant`: the composition of primitives that an attention call computes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import attrs
import torch

from fa4core.kept import Calls, calls_of
from fa4core.program import Program, VariantGraph
from primitives.exp import Exp
from primitives.expr import Capture, algebra, captures
from primitives.expr.trace import Derivative
from primitives.mask import Mask, full
from primitives.schedule import Schedule
from primitives.score import ScoreMod, identity
from primitives.sink import Sink
from primitives.sparsity import BlockMap
from primitives.wording import typed, with_article

if TYPE_CHECKING:
    from fa4core.plan.explain import Explanation
    from fa4core.plan.problem import Problem
    from primitives.sequence import Layout


@attrs.frozen(eq=False, slots=False)
class Variant:
    """A mask, a score mod, a sink, a block map, and the policies of numerics and scheduling.

    Everything is optional and orthogonal; the default is plain full attention.

    Attributes:
        mask: Which keys a query attends to.
        score: What happens to a scaled score before the softmax.
        sink: One more logit in the denominator, or None.
        blocks: Blocks attended to at all, combined with the mask; or None.
        exp: How exponentials are computed; None takes the target's default.
        rescale_threshold: By how much (in the log2 domain) a row's running maximum may grow before
            its accumulator is rescaled; None takes the target's default.
        schedule: How work is handed out; None lets the plan choose.
        spec: Functions, derivatives and policies as one text: what custom operators carry.
        arguments: The captured tensors and scalars of `spec`'s slots.
        constant: Which of them a score mod or sink was differentiated without, because they did
            not require grad when it was defined.
        calls: Prepared calls, found again by `attention`.
    """

    mask: Mask = attrs.field(factory=full)
    score: ScoreMod = attrs.field(factory=identity)
    sink: Sink | None = None
    blocks: BlockMap | None = None
    exp: Exp | None = None
    rescale_threshold: float | None = None
    schedule: Schedule | None = None
    spec: str = attrs.field(init=False, repr=False)
    arguments: list[torch.Tensor] = attrs.field(init=False, repr=False)
    constant: list[bool] = attrs.field(init=False, repr=False)
    calls: Calls = attrs.field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise TypeError(
                    f"{name} is {typed(value)}; {with_article(_names(kind))} is accepted"
                    f"{_hint(value, name)}"
                )
        if self.rescale_threshold is not None and not self.rescale_threshold >= 0:
            raise ValueError(f"rescale_threshold={self.rescale_threshold}; it must be >= 0")
        # Plain attributes, not properties: torch.compile reads them without tracing their making.
        slots = self.program.captures
        known = frozenset().union(*(d.wrt for d in self.gradient))
        used = captures(self.graph.score, self.graph.sink)
        _warn_of_learned(set(captures(self.graph.mask)) - set(used))
        constant = [c in used and c.kind == "float" and c not in known for c in slots]
        object.__setattr__(self, "spec", self.program.dump())
        object.__setattr__(self, "arguments", [c.tensor for c in slots])
        object.__setattr__(self, "constant", constant)
        object.__setattr__(self, "calls", calls_of(self.spec, self.arguments))

    def __reduce__(self) -> tuple:
        """Copies and pickles are made anew of their parts, so that a deep copy of a module holds
        the copies of the parameters that its variant captures."""
        return Variant, tuple(getattr(self, a.name) for a in attrs.fields(Variant) if a.init)

    @cached_property
    def graph(self) -> VariantGraph:
        """Forward functions as one graph; block maps are part of the mask."""
        mask = self.mask if self.blocks is None else self.blocks.apply(self.mask)
        sink = algebra.const(-float("inf")) if self.sink is None else self.sink.expr
        return VariantGraph(mask.expr, self.score.expr, sink)

    @cached_property
    def gradient(self) -> tuple[Derivative, Derivative]:
        """Derivatives of the score mod and of the sink."""
        none = Derivative(algebra.const(0.0))
        return self.score.gradient(), none if self.sink is None else self.sink.gradient()

    @cached_property
    def program(self) -> Program:
        """The variant as backends take it."""
        return Program(self.graph, *self.gradient, self.exp, self.rescale_threshold, self.schedule)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Captured tensors and scalars, in the order of the graph's slots: run-time arguments."""
        return tuple(c.tensor for c in self.graph.captures if c.tensor is not None)

    @cached_property
    def key(self) -> str:
        """What a forward kernel is compiled for, as text: the same for new closures, scalars and
        tensors of the same type."""
        return f"{self.graph.dump()}\nexp {self.exp}\nrescale {self.rescale_threshold}"

    def explain(
        self,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        *,
        problem: Problem | None = None,
        layout: Layout | None = None,
        target: str | None = None,
        backend: str = "auto",
    ) -> Explanation:
        """What a call will do: path, tiles, findings, roofline, modelled cost.

        See `fa4core.plan.explain.explain`.
        """
        from fa4core.plan.explain import explain

        return explain(
            self, q, k, v, problem=problem, layout=layout, target=target, backend=backend
        )


def place_of_part(value: object) -> str | None:
    """Where a part of a variant belongs, as code; None if it is no part."""
    kinds = {name: kind for name, kind in _KINDS.items() if name != "rescale_threshold"}
    field = next((name for name, kind in kinds.items() if isinstance(value, kind)), None)
    return None if value is None or field is None else f"Variant({field}=...)"


def _hint(value: object, field: str) -> str:
    """What to write instead of a value that a field does not accept."""
    if (place := place_of_part(value)) is not None:
        return f"; {typed(value)} belongs to {place}"
    if isinstance(value, torch.Tensor) and field in _OF_TENSORS:
        return f"; make it one with {_OF_TENSORS[field]}"
    if callable(value) and field in ("mask", "score"):
        return f"; wrap the function with {field}.define"
    return ""


def _warn_of_learned(captured: Iterable[Capture]) -> None:
    """Say that what only a mask captures gets no gradient, although it requires one."""
    for capture in captured:
        tensor = capture.tensor
        if tensor is not None and tensor.requires_grad:
            warnings.warn(
                f"the mask captures a tensor of shape {tuple(tensor.shape)} that requires grad, "
                "and no score mod or sink does: a mask says yes or no, so the tensor gets no "
                "gradient. To learn it, let a score mod use it, such as a bias that grows with "
                "the distance to the threshold; if it is not to be learned here, capture "
                "`tensor.detach()`",
                stacklevel=4,  # whoever makes the variant
            )


def _names(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join("None" if k is type(None) else k.__name__ for k in kinds)


_KINDS: dict[str, type | tuple[type, ...]] = {
    "mask": Mask,
    "score": ScoreMod,
    "sink": (Sink, type(None)),
    "blocks": (BlockMap, type(None)),
    "exp": (Exp, type(None)),
    "rescale_threshold": (float, int, type(None)),
    "schedule": (Schedule, type(None)),
}

#: What makes a part of a tensor, by field.
_OF_TENSORS = {
    "mask": "mask.dense(tensor)",
    "score": "score.dense_bias(tensor)",
    "sink": "sink.learned(tensor)",
    "blocks": "sparsity.from_topk or sparsity.from_dense",
}
