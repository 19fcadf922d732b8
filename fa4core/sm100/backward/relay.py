"""The relay role: one warp that tells the MMA role when dS has come from the peer.

A copy from CTA to CTA reports to a barrier where it arrives; only the first CTA issues products.
"""

from __future__ import annotations

from typing import Any

from cutlass import cute

from fa4core.pipeline.effects import Fixed
from fa4core.pipeline.endpoint import Ends
from fa4core.pipeline.loop import range


@cute.jit
def relay(work: Any, plan: Any, ends: Ends):
    """Block by block."""
    copied, exchanged = ends.waits("ds_copied"), ends.posts("ds_exchanged")
    source = plan.source(ends)
    index = source.first()
    while index < plan.count:
        item = plan.item(index)
        for _ in range(item.blocks, unroll=1):
            copied.take(work.cta)
            exchanged.arrive()
        index = source.next(index)


class RelayWork(Fixed):
    """Nothing but signals.

    Attributes:
        cta: Rank of the CTA in its pair.
    """

    def __init__(self, cta: Any):
        self.cta = cta
