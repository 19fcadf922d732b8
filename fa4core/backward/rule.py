"""`Rule`: the functions that a backward kernel computes, as nodes over one list of captures."""

from __future__ import annotations

import attrs
import torch

from fa4core.program import Program
from primitives.expr import Capture, Node, algebra, captures, dump, parse, substitute


@attrs.frozen(eq=False)
class Rule:
    """Mask and score mod of a variant, with the score mod's derivatives. (The derivative of a sink
    needs no scores: no kernel computes it.)

    Attributes:
        mask, score: As of the forward pass.
        by_score: d value / d score.
        elements: Of captured tensors: each as a gather, and d value / d element.
    """

    mask: Node
    score: Node
    by_score: Node
    elements: tuple[tuple[Node, Node], ...] = ()

    @classmethod
    def of(cls, program: Program) -> Rule:
        rule = program.score_gradient
        elements = tuple(
            (algebra.gather(capture, indices), value) for capture, indices, value in rule.captured
        )
        return cls(program.graph.mask, program.graph.score, rule.score, elements)

    @property
    def roots(self) -> tuple[Node, ...]:
        pairs = [node for pair in self.elements for node in pair]
        return self.mask, self.score, self.by_score, *pairs

    @property
    def captures(self) -> tuple[Capture, ...]:
        """The kernel's captured tensors, in its order."""
        return captures(*self.roots)

    @property
    def receivers(self) -> tuple[Capture, ...]:
        """The captured tensors that receive a gradient, in the order of the kernel's arguments."""
        wanted = {element.attr for element, _ in self.elements}
        return tuple(c for c in self.captures if c in wanted)

    @property
    def is_identity(self) -> bool:
        """Whether gradients of the score mod's values are those of scores, and nothing else."""
        return self.by_score is algebra.const(1.0) and not self.elements

    def exchanged(self, replace: dict[Node, Node]) -> Rule:
        """The rule with nodes in place of others."""
        mask, score, by_score, *rest = substitute(self.roots, replace)
        return Rule(mask, score, by_score, tuple(zip(rest[::2], rest[1::2], strict=True)))

    def dump(self) -> str:
        return dump(self.roots)

    @classmethod
    def parse(cls, text: str, tensors: tuple[torch.Tensor, ...] | None = None) -> Rule:
        """The rule back from `dump`'s text, with `tensors` in its slots or placeholders."""
        mask, score, by_score, *rest = parse(text, tensors)
        return cls(mask, score, by_score, tuple(zip(rest[::2], rest[1::2], strict=True)))
