"""One emulated GPU: the thin Python side of the native core.

It turns `Launch` values into calls of the core and the core's JSON into `Statistics` and `Report`s.
Who uses it: `fa4core.emulator.session`, and tests of the core.
"""

from __future__ import annotations

import ctypes
import json
from collections import Counter
from typing import Any

import numpy as np

from fa4core.compile.targets import resolve
from fa4core.emulator import native
from fa4core.emulator.launch import (
    DETECTORS,
    Allocation,
    EmulatorError,
    Event,
    Launch,
    Report,
    Statistics,
)
from fa4core.emulator.trace import Trace, read_trace

_FLAGS = {"uninitialised": 1, "race": 2, "bounds": 4, "tmem": 8, "barrier": 16, "registers": 32}
_TIMELINE, _TRACE = 64, 128


def detectors(detect: frozenset[str] | str) -> frozenset[str]:
    """`"all"`, `"none"` or a set of names -> the set; unknown names are refused."""
    if isinstance(detect, str):
        detect = {"all": DETECTORS, "none": frozenset()}.get(detect, frozenset({detect}))
    if unknown := set(detect) - DETECTORS:
        raise ValueError(f"unknown detectors {sorted(unknown)}; there are {sorted(DETECTORS)}")
    return frozenset(detect)


class Machine:
    """One emulated GPU. Launches run one after another, each in the order that the seed gives."""

    def __init__(
        self,
        target: str = "sm100",
        seed: int = 0,
        detect: frozenset[str] | str = "all",
        num_sms: int | None = None,
        timeline: bool = False,
        trace: bool = False,
    ):
        self.target, self.seed, self.detect = target, seed, detectors(detect)
        self.num_sms = num_sms or resolve(target).num_sms
        flags = sum(_FLAGS[name] for name in self.detect) + _TIMELINE * timeline + _TRACE * trace
        self._core = native.library()
        self._handle = self._core.emu_create(target.encode(), seed, flags, self.num_sms)

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._core.emu_destroy(handle)

    def register(self, allocation: Allocation) -> None:
        """Makes device memory known; it replaces older allocations at the same place."""
        self._core.emu_register(
            self._handle,
            allocation.address,
            allocation.nbytes,
            allocation.name.encode(),
            int(allocation.initialised),
        )

    def forget(self, address: int) -> None:
        """Takes back an allocation: touching it is out of bounds from now on."""
        self._core.emu_forget(self._handle, address)

    def parameters(self, ptx: str, kernel: str) -> list[tuple[int, int]]:
        """(offset, bytes) of each parameter of a kernel, in order."""
        text = ptx.encode()
        raw = self._core.emu_params(self._handle, text, len(text), kernel.encode()).decode()
        if raw.startswith("error"):
            _, line, message = raw.split(" ", 2)
            report = Report("instruction", message, kernel, ptx_line=int(line))
            raise EmulatorError([report])
        pairs = [line.split() for line in raw.splitlines()]
        return [(int(offset), int(size)) for offset, size in pairs]

    def launch(self, launch: Launch) -> Statistics:
        """Runs a kernel to its end. Raises `EmulatorError` if a detector has something to say."""
        raw = self._pack(launch)
        dims = (ctypes.c_uint32 * 9)(*launch.grid, *launch.block, *launch.cluster)
        text = launch.ptx.encode()
        self._core.emu_launch(
            self._handle,
            text,
            len(text),
            launch.kernel.encode(),
            dims,
            launch.dynamic_smem,
            raw,
            len(raw),
        )
        result = json.loads(self._core.emu_result(self._handle).decode(errors="replace"))
        if result["findings"]:
            name = launch.name or launch.kernel
            raise EmulatorError([_report(finding, name) for finding in result["findings"]])
        return self._statistics(launch, result)

    def _pack(self, launch: Launch) -> bytes:
        layout = self.parameters(launch.ptx, launch.kernel)
        if len(layout) != len(launch.params):
            message = f"the kernel has {len(layout)} parameters, the launch {len(launch.params)}"
            raise EmulatorError([Report("instruction", message, launch.kernel)])
        packed = bytearray(layout[-1][0] + layout[-1][1] if layout else 0)
        for (offset, size), value in zip(layout, launch.params, strict=True):
            packed[offset : offset + size] = value[:size].ljust(size, b"\0")
        return bytes(packed)

    def _statistics(self, launch: Launch, result: dict[str, Any]) -> Statistics:
        by_warp = {index: kinds for index, kinds in enumerate(result["by_warp"]) if kinds}
        total: Counter[str] = Counter()
        for kinds in by_warp.values():
            total.update(kinds)
        return Statistics(
            name=launch.name or launch.kernel,
            seconds=result["seconds"],
            seed=self.seed,
            instructions=dict(total),
            by_warp=by_warp,
            barrier_waits=result["waits"],
            bytes=result["bytes"],
            mma=result["mma"],
            timeline=tuple(Event(*event) for event in result["timeline"]),
            trace=self._trace(),
        )

    def _trace(self) -> Trace | None:
        count = ctypes.c_uint64()
        words = self._core.emu_trace(self._handle, ctypes.byref(count))
        if not count.value:
            return None
        return read_trace(np.ctypeslib.as_array(words, (count.value,)).copy())


def _report(finding: dict[str, Any], kernel: str) -> Report:
    return Report(
        kind=finding["kind"],
        message=finding["message"],
        kernel=kernel,
        cta=tuple(finding["cta"]) if "cta" in finding else None,
        warp=finding.get("warp"),
        ptx_line=finding["line"],
        ptx=finding["ptx"],
        source=finding["source"],
    )
