"""The backward's role code, handed to the checker for a list of work tiles.

The functions are those that `kernel` runs; nothing of the protocol is written down here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fa4core.backward.work import Plan
from fa4core.forward import protocol
from fa4core.forward.protocol import Role
from fa4core.pipeline.check import check
from fa4core.pipeline.record import Program
from fa4core.sm100.backward.compute import ComputeWork, compute
from fa4core.sm100.backward.load import LoadWork, load
from fa4core.sm100.backward.mma import MmaWork, mma
from fa4core.sm100.backward.reduce import ReduceWork, reduce
from fa4core.sm100.backward.relay import RelayWork, relay
from fa4core.sm100.backward.spec import Spec

ROLES: dict[str, tuple[Role, type]] = {
    "reduce": (reduce, ReduceWork),
    "compute": (compute, ComputeWork),
    "mma": (mma, MmaWork),
    "load": (load, LoadWork),
}
PAIR_ROLES: dict[str, tuple[Role, type]] = {"relay": (relay, RelayWork)}


def programs(
    spec: Spec, blocks: Sequence[int], change: Mapping[str, Role] | None = None
) -> list[Program]:
    """The events of every role for these work tiles; `change` replaces role functions."""
    known = {
        "pair": spec.pair,
        "dq_inside": spec.dq_inside,
        "ahead": spec.ahead,
        "with_v": spec.with_v,
        "with_k": spec.with_k,
        "stages": spec.stages.added,
        "groups": spec.held,
        "parts_ahead": spec.parts_ahead,
        "deterministic": spec.deterministic,
        "results": spec.results,
    }
    roles = ROLES | (PAIR_ROLES if spec.pair else {})
    if not spec.with_k:
        del roles["reduce"]
    return protocol.programs(roles, spec, blocks, known, change, Plan)


def check_backward(
    spec: Spec, blocks: Sequence[int], change: Mapping[str, Role] | None = None
) -> None:
    """Check the protocol for a CTA or a pair that works through tiles of these many query blocks.

    Raises:
        fa4core.pipeline.check.ProtocolError: With a counterexample.
    """
    check(spec.pipeline, programs(spec, blocks, change))
