"""`Program`: a variant as backends take it - functions, derivatives and policies, nothing else.

A program is written as one self-contained text and a list of run-time tensors; custom operators
carry the two, so that neither closures nor Python objects pass through torch's dispatcher, and the
text alone says what a kernel is compiled for. `Variant` makes programs, `fa4core.ops` carries them.
"""

from __future__ import annotations

import json
from functools import cached_property, lru_cache
from typing import Any

import attrs
import torch

from primitives.exp import Exp
from primitives.expr import Capture, Node, algebra, captures, dump, parse
from primitives.expr.trace import Derivative
from primitives.schedule import Schedule


@attrs.frozen(eq=False, slots=False)
class VariantGraph:
    """A variant's functions as nodes over one list of captures.

    Attributes:
        mask: bool over b, h, q, k, seqlen_q, seqlen_k.
        score: float over the same and `score`.
        sink: float over b, h, q; the constant -inf where there is none.
    """

    mask: Node
    score: Node
    sink: Node

    @property
    def roots(self) -> tuple[Node, Node, Node]:
        return self.mask, self.score, self.sink

    @cached_property
    def captures(self) -> tuple[Capture, ...]:
        return captures(*self.roots)

    @property
    def has_sink(self) -> bool:
        return not (self.sink.is_const and self.sink.attr == -float("inf"))

    def dump(self) -> str:
        return dump(self.roots)

    @classmethod
    def parse(cls, text: str, tensors: tuple[torch.Tensor, ...]) -> VariantGraph:
        """The graph back from `dump`'s text with its run-time tensors bound."""
        return cls(*parse(text, tensors))


@attrs.frozen(eq=False, slots=False)
class Program:
    """What an attention call computes and how.

    Attributes:
        graph: The forward functions.
        score_gradient: Derivatives of the score mod.
        sink_gradient: Derivatives of the sink.
        exp: How exponentials are computed; None takes the target's default.
        rescale_threshold: See `Variant`.
        schedule: How work is handed out; None lets the plan choose.
    """

    graph: VariantGraph
    score_gradient: Derivative
    sink_gradient: Derivative
    exp: Exp | None = None
    rescale_threshold: float | None = None
    schedule: Schedule | None = None

    @property
    def _roots(self) -> list[Node]:
        """Every function as a root; an element that receives a gradient as the gather of it."""
        roots = [*self.graph.roots, self.score_gradient.score]
        for capture, indices, value in self.score_gradient.captured + self.sink_gradient.captured:
            roots += [algebra.gather(capture, indices), value]
        return roots

    @cached_property
    def captures(self) -> tuple[Capture, ...]:
        """The run-time arguments, in the order of the text's slots."""
        return captures(*self._roots)

    def dump(self) -> str:
        """One self-contained text: a line of policies, then the graph."""
        policies = {
            "exp": None if self.exp is None else attrs.asdict(self.exp),
            "rescale_threshold": self.rescale_threshold,
            "schedule": None if self.schedule is None else attrs.asdict(self.schedule),
            "score_gradients": len(self.score_gradient.captured),
        }
        return f"{json.dumps(policies)}\n{dump(self._roots)}"

    @classmethod
    def parse(cls, text: str, tensors: list[torch.Tensor] | None = None) -> Program:
        """The program back from its text, with `tensors` in its slots or placeholders."""
        head, _, graph = text.partition("\n")
        policies = _policies(head)
        mask, score, sink, by_score, *rest = parse(graph, tensors)
        elements = [(e.attr, e.args, value) for e, value in zip(rest[::2], rest[1::2], strict=True)]
        of_score = policies["score_gradients"]
        return cls(
            VariantGraph(mask, score, sink),
            Derivative(by_score, tuple(elements[:of_score])),
            Derivative(algebra.const(0.0), tuple(elements[of_score:])),
            policies["exp"],
            policies["rescale_threshold"],
            policies["schedule"],
        )


@lru_cache(maxsize=1024)
def _policies(line: str) -> dict[str, Any]:
    values = json.loads(line)
    for name, kind in (("exp", Exp), ("schedule", Schedule)):
        if values[name] is not None:
            values[name] = kind(**values[name])
    return values
