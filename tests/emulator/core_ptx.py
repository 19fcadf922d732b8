"""Runs hand-written PTX on numpy arrays: what the tests of the core share.

The body of a kernel finds the addresses of the arrays in %rd0, %rd1, ..., the thread's number in
%r0, and the address of its dynamic shared memory in %r1. Registers: %p0-31, %h0-63 (16 bits), %r,
%f (32 bits) and %rd (64 bits).
"""

from __future__ import annotations

import numpy as np
import pytest

from fa4core.emulator import native
from fa4core.emulator.launch import Allocation, EmulatorError, Launch, Report, Statistics
from fa4core.emulator.machine import Machine

try:
    native.compiler()
except native.CompilerMissing:  # pragma: no cover
    pytest.skip("no C++ compiler", allow_module_level=True)

FRAME = """.version 8.8
.target {target}
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k({params})
{{
.reg .pred %p<32>; .reg .b16 %h<64>; .reg .b32 %r<512>; .reg .f32 %f<128>; .reg .b64 %rd<128>;
{loads}
mov.u32 %r0, %tid.x;
mov.b32 %r1, smem;
{body}
ret;
}}
"""


def ptx(body: str, arrays: int, target: str = "sm_100a") -> str:
    params = ", ".join(f".param .u64 a{i}" for i in range(arrays))
    loads = " ".join(f"ld.param.b64 %rd{i}, [a{i}];" for i in range(arrays))
    return FRAME.format(body=body, params=params, loads=loads, target=target)


def run(
    body: str,
    *arrays: np.ndarray,
    grid: int = 1,
    block: int = 32,
    cluster: int = 1,
    smem: int = 0,
    seed: int = 0,
    detect: frozenset[str] | str = "all",
    fresh: tuple[int, ...] = (),
    timeline: bool = False,
    trace: bool = False,
) -> Statistics:
    """Runs the kernel; `fresh` numbers the arrays whose contents count as unwritten."""
    machine = Machine(seed=seed, detect=detect, timeline=timeline, trace=trace)
    for i, a in enumerate(arrays):
        machine.register(Allocation(a.ctypes.data, a.nbytes, f"a{i}", initialised=i not in fresh))
    params = tuple(a.ctypes.data.to_bytes(8, "little") for a in arrays)
    text = ptx(body, len(arrays))
    launch = Launch(text, "k", (grid, 1, 1), (block, 1, 1), (cluster, 1, 1), smem, params)
    return machine.launch(launch)


def findings(body: str, *arrays: np.ndarray, **options) -> list[Report]:
    """The reports of a kernel that has a bug; [] if none was found."""
    try:
        run(body, *arrays, **options)
    except EmulatorError as error:
        return error.reports
    return []


def kinds(body: str, *arrays: np.ndarray, **options) -> set[str]:
    return {report.kind for report in findings(body, *arrays, **options)}


def per_thread(code: str, *inputs: np.ndarray, out: np.dtype | type = np.uint32) -> np.ndarray:
    """`code` computes %r10 (%rd10 for 8-byte results) from %r11, %r12, ... (%rd11, ... for 8-byte
    inputs), one element of each input per thread."""
    n = len(inputs[0])
    result = np.zeros(n, out)
    lines = []
    for i, a in enumerate(inputs):
        size = a.dtype.itemsize
        lines.append(f"mul.wide.u32 %rd50, %r0, {size}; add.s64 %rd50, %rd50, %rd{i};")
        register = {2: "%h", 4: "%r", 8: "%rd"}[size] + str(11 + i)
        lines.append(f"ld.global.b{8 * size} {register}, [%rd50];")
    size = result.dtype.itemsize
    register = {2: "%h10", 4: "%r10", 8: "%rd10"}[size]
    lines += [code, f"mul.wide.u32 %rd50, %r0, {size}; add.s64 %rd50, %rd50, %rd{len(inputs)};"]
    lines.append(f"st.global.b{8 * size} [%rd50], {register};")
    run("\n".join(lines), *[np.ascontiguousarray(a) for a in inputs], result, block=n)
    return result
