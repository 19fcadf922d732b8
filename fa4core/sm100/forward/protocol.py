"""The forward's role code, handed to the checker for a list of work tiles.

The functions are those that `kernel` runs; nothing of the protocol is written down here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fa4core.forward import protocol
from fa4core.forward.protocol import Role
from fa4core.forward.source import Answers, scheduler
from fa4core.pipeline.check import check
from fa4core.pipeline.record import Program
from fa4core.sm100.forward.correction import CorrectionWork, correction
from fa4core.sm100.forward.load import LoadWork, load
from fa4core.sm100.forward.mma import MmaWork, mma
from fa4core.sm100.forward.softmax import SoftmaxWork, softmax
from fa4core.sm100.forward.spec import Spec
from fa4core.sm100.forward.store import StoreWork, store

ROLES: dict[str, tuple[Role, type]] = {
    "softmax": (softmax, SoftmaxWork),
    "correction": (correction, CorrectionWork),
    "mma": (mma, MmaWork),
    "load": (load, LoadWork),
    "store": (store, StoreWork),
}
QUEUE_ROLES: dict[str, tuple[Role, type]] = {"scheduler": (scheduler, Answers)}


def programs(
    spec: Spec, blocks: Sequence[int], change: Mapping[str, Role] | None = None
) -> list[Program]:
    """The events of every role for these work tiles; `change` replaces role functions."""
    roles = ROLES | (QUEUE_ROLES if spec.dynamic else {})
    known = {
        "tiles": tuple(range(spec.tiles)),
        "parts": tuple(range(spec.out_parts)),
        "holds_k": spec.holds_k,
    }
    return protocol.programs(roles, spec, blocks, known, change)


def check_forward(
    spec: Spec, blocks: Sequence[int], change: Mapping[str, Role] | None = None
) -> None:
    """Check the protocol for one CTA, or a pair, that works through tiles of these many key blocks.

    Raises:
        fa4core.pipeline.check.ProtocolError: With a counterexample.
    """
    check(spec.pipeline, programs(spec, blocks, change))
