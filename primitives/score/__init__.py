"""Score mods: what happens to a score before the softmax. They compose in order with `>>`."""

from primitives.score.core import ScoreMod, define, identity

__all__ = ["ScoreMod", "define", "identity"]
