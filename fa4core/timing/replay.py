"""Runs instruction sequences through the simulator: tables in, cycles and where they went out."""

from __future__ import annotations

import ctypes
import functools
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from fa4core.emulator import native
from fa4core.emulator.trace import MMA_FLAGS, Kind, Trace
from fa4core.plan.target import Rates
from fa4core.timing.graph import Graph
from fa4core.timing.match import Step, match
from fa4core.timing.parameters import (
    OPS,
    UNITS,
    Parameters,
    groups_of,
    latency_of,
    occupancy,
    op_of,
    packed,
)

SOURCES = Path(__file__).parent / "native"
LIMIT = 20_000_000  # cycles

#: What a warp's cycles went into.
REASONS = ("issued", "fixed", "not chosen", "pipe", "operands", "barrier", "mbarrier", "done")


@attrs.frozen(eq=False, slots=False)
class Program:
    """What the warps of one cluster execute.

    Attributes:
        graph: The machine code.
        warps: (CTA rank, warp) and the steps of each.
        ctas: Of the cluster.
    """

    graph: Graph
    warps: tuple[tuple[int, int, list[Step]], ...]
    ctas: int

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Events, warps and steps as the core takes them."""
        return _tables(self)

    @property
    def pair(self) -> bool:
        """Whether matrix products use the tensor cores of two CTAs."""
        events = self.tables[0]
        products = events[events[:, 0] == Kind.MMA]
        return bool((products[:, 4] & MMA_FLAGS["pair"]).any())


def program_of(graph: Graph, trace: Trace, cluster: int, ctas: int) -> Program:
    """What cluster number `cluster` of a launch executed.

    Raises:
        fa4core.timing.graph.NoMatch: Trace and machine code do not fit each other.
    """
    own = [w for w in trace.warps if w.cta // ctas == cluster]
    if not own:
        raise ValueError(f"there is no cluster {cluster} in this trace")
    warps = tuple(
        (w.cta % ctas, w.warp, match(graph, w, trace.lines))
        for w in sorted(own, key=lambda w: (w.cta, w.warp))
    )
    return Program(graph, warps, ctas)


@attrs.frozen(eq=False)
class Replayed:
    """Modelled cycles of one cluster.

    Attributes:
        cycles: From its start to its last instruction.
        seed: Of the jitter.
        warps: Each with `cta`, `warp`, `finished`, `spent` (cycles by `REASONS`), `mbarriers`
            ([CTA rank, offset, cycles]) and `pipes` ([0, unit, cycles]: for whose result).
        units: Busy cycles of an SM by unit; the mean over the cluster's SMs.
        spots: [instruction, number of a reason, cycles] of the first CTA's warps together.
        spans: [CTA rank, lane, kind, start, stop] of tensor core (-1) and bulk copies (-2).
    """

    cycles: int
    seed: int
    warps: list[dict[str, Any]]
    units: dict[str, float]
    spots: list[list[int]]
    spans: list[list[int]]


def replay(
    program: Program, rates: Rates, parameters: Parameters, seed: int = 0, spans: bool = False
) -> Replayed:
    """Modelled time of a program under one seed.

    Raises:
        RuntimeError: It waits for ever; with who waits for what.
    """
    statics = _statics(program.graph, rates)
    events, warps, steps = program.tables
    raw = _core().replay(
        np.array(packed(parameters), np.float64).ctypes.data_as(ctypes.c_void_p),
        statics.ctypes.data_as(ctypes.c_void_p), len(statics),
        events.ctypes.data_as(ctypes.c_void_p), len(events),
        warps.ctypes.data_as(ctypes.c_void_p), len(warps),
        steps.ctypes.data_as(ctypes.c_void_p),
        program.ctas, int(program.pair), seed, LIMIT, int(spans),
    ).decode()  # fmt: skip
    if raw.startswith("error: "):
        raise RuntimeError(raw.removeprefix("error: "))
    found = json.loads(raw)
    return Replayed(
        found["cycles"], seed, found["warps"], _units(found), found["spots"], found["spans"]
    )


def _units(found: dict[str, Any]) -> dict[str, float]:
    sms = found["sms"]
    per_scheduler = {
        name: sum(sm["pipes"][n] for sm in sms) / len(sms) / 4 for n, name in enumerate(UNITS)
    }
    tensor = sum(found["tensor"]) / len(found["tensor"])
    return {
        "tensor": tensor,
        "SMEM": sum(sm["smem"] for sm in sms) / len(sms),
        "MUFU": per_scheduler["MUFU"],
        "FMA": per_scheduler["FMA"],
        "ALU": per_scheduler["ALU"],
        "TMEM": sum(sm["tmem"] for sm in sms) / len(sms) / 4,
        "TMA": sum(sm["tma"] for sm in sms) / len(sms),
        "issue": sum(sm["issued"] for sm in sms) / len(sms) / 4,
    }


def _statics(graph: Graph, rates: Rates) -> np.ndarray:
    rows = []
    for i, c in zip(graph.code.instructions, graph.control, strict=True):
        pipe, clocks = occupancy(i, rates)
        rows.append(
            (
                *(UNITS.index(pipe), clocks, c.stall, c.switch, c.write, c.read, c.wait),
                *(OPS.index(op_of(i)), latency_of(i), groups_of(i)),
            )
        )
    return np.array(rows, np.int32)


def _tables(program: Program) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    events: list[Sequence[int]] = []
    warps, steps = [], []
    for cta, warp, found in program.warps:
        warps.append((cta, warp, len(found)))
        for step in found:
            own = [e[2:] for e in step.events]
            if program.graph.code.instructions[step.index].opcode.startswith("U"):
                own = list(dict.fromkeys(own))  # of the uniform datapath: once for the whole warp
            steps.append((step.index, len(events), len(own)))
            events.extend(own)
    empty = [(0,) * 6]
    return (
        np.array(events or empty, np.int32),
        np.array(warps, np.int32),
        np.array(steps, np.int32),
    )


@functools.cache
def _core() -> ctypes.CDLL:
    core = ctypes.CDLL(str(native.build(SOURCES)))
    u64, i32, pointer = ctypes.c_uint64, ctypes.c_int32, ctypes.c_void_p
    core.replay.restype = ctypes.c_char_p
    core.replay.argtypes = [
        pointer, pointer, u64, pointer, u64, pointer, u64, pointer, i32, i32, u64,
        ctypes.c_int64, i32,
    ]  # fmt: skip
    return core
