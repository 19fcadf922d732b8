"""`KernelSpec`: what every attention kernel is compiled for, forward or backward.

Plain values: nothing here imports the DSL. `fa4core.forward.spec` and `fa4core.backward.spec` add
what belongs to a pass; a target's `Spec` adds its own choices and declares the pipeline.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import ClassVar

import attrs

from fa4core.pipeline.declare import Pipeline
from fa4core.pipeline.layout import Placed, place
from primitives.exp import Exp

MAX_HEAD_DIM = 256

#: Of run-time scales that scaled scores may be divided by.
LEAST_SCALE = 2.0**-64


@attrs.frozen(slots=False)
class KernelSpec:
    """An attention kernel.

    Attributes:
        graph: The variant's functions as canonical text.
        dtype: "bfloat16" or "float16".
        head_dim, head_dim_v: Of the problem.
        exp: How exponentials are computed.
        negative_scale: Whether the run-time scale may be below `LEAST_SCALE`. Scores are then
            scaled before anything else: -inf and a maximum would not survive it.
        target: Name of the target.
    """

    graph: str
    dtype: str
    head_dim: int
    head_dim_v: int
    exp: Exp = attrs.field(factory=Exp, kw_only=True)
    negative_scale: bool = attrs.field(default=False, kw_only=True)
    target: str = attrs.field(kw_only=True)

    title: ClassVar[str]  # of the kernels

    def __str__(self) -> str:
        """An identifier: the DSL makes it part of the kernel's name."""
        return f"{self.title}_{hashlib.blake2b(repr(self).encode(), digest_size=8).hexdigest()}"

    @property
    def d(self) -> int:
        """Head dim of the tiles: what an MMA step of 16 divides. TMA fills it up with zeros."""
        return -(-self.head_dim // 16) * 16

    @property
    def d_v(self) -> int:
        return -(-self.head_dim_v // 16) * 16

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
