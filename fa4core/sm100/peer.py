"""Copies from a CTA's shared memory into that of the other CTA of a pair."""

from __future__ import annotations

from typing import Any

import attrs
import cutlass
from cutlass import cute


@attrs.frozen(eq=False)
class ToPeer:
    """A copy of consecutive bytes.

    Attributes:
        of: Where they are.
        to: Where they go in the peer's shared memory, as an address of this CTA's.
        nbytes: How many; a multiple of 16.
    """

    of: cute.Pointer
    to: cute.Pointer
    nbytes: int

    def start(self, barrier: cute.Pointer) -> None:
        """By one thread. Reports to the peer's barrier, which is given as this CTA's."""
        code = """{
            .reg .b32 to, at;
            mapa.shared::cluster.u32 to, {$r0}, {$r3};
            mapa.shared::cluster.u32 at, {$r2}, {$r3};
            cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes
                [to], [{$r1}], {$r4}, [at];
        }"""
        peer = cute.arch.block_idx_in_cluster() ^ 1
        places = [pointer.toint() for pointer in (self.to, self.of, barrier)]
        given: list[Any] = [*places, peer, cutlass.Int32(self.nbytes)]
        cute.arch.inline_ptx(code, read_only_args=given)
