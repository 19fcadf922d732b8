"""Copies from a CTA's shared memory into that of the other CTA of a pair."""

from __future__ import annotations

from typing import Any

import attrs
from cutlass import cute

from fa4core.pipeline.effects import Fixed


@attrs.frozen(eq=False)
class ToPeer(Fixed):
    """A copy of consecutive bytes.

    Attributes:
        of: Where they are.
        distance: Bytes from there to where they go in the peer's memory, for each rank of this CTA.
        nbytes: How many; a multiple of 16.
    """

    of: cute.Pointer
    distance: tuple[int, int]
    nbytes: int

    def start(self, barrier: cute.Pointer) -> None:
        """By one thread. Reports to the peer's barrier, which is given as this CTA's."""
        first, second = self.distance
        # one block, in which nothing can be computed ahead and kept in registers
        code = f"""{{
            .reg .pred second;
            .reg .b32 cta, to, at;
            setp.ne.u32 second, {{$r2}}, 0;
            xor.b32 cta, {{$r2}}, 1;
            mov.b32 to, {first};
            @second mov.b32 to, {second};
            add.s32 to, to, {{$r0}};
            mapa.shared::cluster.u32 to, to, cta;
            mapa.shared::cluster.u32 at, {{$r1}}, cta;
            cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
                [to], [{{$r0}}], {self.nbytes}, [at];
        }}"""
        given: list[Any] = [self.of.toint(), barrier.toint(), cute.arch.block_idx_in_cluster()]
        cute.arch.inline_ptx(code, read_only_args=given)
