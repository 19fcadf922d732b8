"""`ForwardSpec`: what every forward kernel is compiled for, on whichever target."""

from __future__ import annotations

import math

import attrs

from fa4core.spec import KernelSpec


@attrs.frozen(slots=False)
class ForwardSpec(KernelSpec):
    """A forward kernel.

    Attributes:
        graph: Mask, score mod and sink (`VariantGraph.dump`).
        threshold: Growth of a row's maximum, log2 domain, that is left unapplied.
        negative_scale: Whether the run-time scale may be 0 or below: the maximum of scaled scores
            is then not the scaled maximum of scores.
    """

    threshold: float = attrs.field(default=8.0, kw_only=True)
    negative_scale: bool = attrs.field(default=False, kw_only=True)

    title = "forward"

    @property
    def far(self) -> float:
        """Scores, log2 domain, from which on float32 is too coarse for a weight's exponent.

        Rounding a smaller one takes up to far / 2^25 of it, and the largest weight, 2^threshold,
        must stay finite when that much is added to its exponent.
        """
        room = 15.9 if self.dtype == "float16" else 96.0
        return 2.0 ** (25 + min(4, math.floor(math.log2(room - self.threshold))))
