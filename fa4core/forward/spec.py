"""`ForwardSpec`: what every forward kernel is compiled for, on whichever target.

Plain values: nothing here imports the DSL. A target's `Spec` adds its own choices and declares the
pipeline that follows from them.
"""

from __future__ import annotations

import hashlib
import math
from functools import cached_property

import attrs

from fa4core.pipeline.declare import Pipeline
from fa4core.pipeline.layout import Placed, place
from primitives.exp import Exp

MAX_HEAD_DIM = 256


@attrs.frozen(slots=False)
class ForwardSpec:
    """A forward kernel.

    Attributes:
        graph: Mask, score mod and sink as canonical text (`VariantGraph.dump`).
        dtype: "bfloat16" or "float16".
        head_dim, head_dim_v: Of the problem.
        exp: How exponentials are computed.
        threshold: Growth of a row's maximum, log2 domain, that is left unapplied.
        negative_scale: Whether the run-time scale may be 0 or below: the maximum of scaled scores
            is then not the scaled maximum of scores.
        target: Name of the target.
    """

    graph: str
    dtype: str
    head_dim: int
    head_dim_v: int
    exp: Exp = attrs.field(factory=Exp, kw_only=True)
    threshold: float = attrs.field(default=8.0, kw_only=True)
    negative_scale: bool = attrs.field(default=False, kw_only=True)
    target: str = attrs.field(kw_only=True)

    def __str__(self) -> str:
        """An identifier: the DSL makes it part of the kernel's name."""
        return f"forward_{hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()}"

    @property
    def d(self) -> int:
        """Head dim of the tiles: what an MMA step of 16 divides. TMA fills it up with zeros."""
        return -(-self.head_dim // 16) * 16

    @property
    def d_v(self) -> int:
        return -(-self.head_dim_v // 16) * 16

    @property
    def far(self) -> float:
        """Scores, log2 domain, from which on float32 is too coarse for a weight's exponent.

        Rounding a smaller one takes up to far / 2^25 of it, and the largest weight, 2^threshold,
        must stay finite when that much is added to its exponent.
        """
        room = 15.9 if self.dtype == "float16" else 96.0
        return 2.0 ** (25 + min(4, math.floor(math.log2(room - self.threshold))))

    @cached_property
    def pipeline(self) -> Pipeline:
        """Roles, signals and memory."""
        raise NotImplementedError

    @cached_property
    def smem(self) -> dict[str, Placed]:
        """Where regions of shared memory lie."""
        return place(self.pipeline.smem, self.pipeline.limits.smem_bytes, "bytes")

    @property
    def smem_bytes(self) -> int:
        return max(p.offset + p.stride * p.region.stages for p in self.smem.values())
