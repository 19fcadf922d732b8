"""What a launch did, warp by warp: `Statistics.trace` of a run with ``trace=True``.

For every warp the PTX statements it executed, in order, and an `Event` for each operation that
synchronises, moves data or multiplies. It holds no times: what the operations cost on a GPU is for
its readers to model. Lanes that diverge appear one group after the other.
"""

from __future__ import annotations

from enum import IntEnum

import attrs
import numpy as np


class Kind(IntEnum):
    """What an event is, and what its operands are. A barrier is a pair: the rank of a CTA in its
    cluster and an offset in that CTA's shared memory. The core's trace.h has the same list."""

    MBARRIER_INIT = 0  # a, b barrier; c arrivals of a phase
    MBARRIER_ARRIVE = 1  # a, b barrier; c arrivals; d bytes that it expects
    MBARRIER_BYTES = 2  # a, b barrier; d bytes expected (negative: complete)
    MBARRIER_WAIT = 3  # a, b barrier; c parity; d 1: the phase was complete
    BARRIER_SYNC = 4  # a number; c threads
    BARRIER_ARRIVE = 5  # a number; c threads
    CLUSTER_ARRIVE = 6
    CLUSTER_WAIT = 7
    MMA = 8  # a M; b N; c K; d `MMA_FLAGS`; e first TMEM column of D, if that is where it is
    TENSOR_COPY = 9  # a rows; b columns
    COMMIT = 10  # a mask of CTAs; b offset of the barrier
    TMEM_LOAD = 11  # a lanes; b columns; e first column
    TMEM_STORE = 12  # the same
    TMEM_WAIT = 13  # a 0: for loads, 1: for stores
    BULK_LOAD = 14  # a, b barrier; c bytes; d CTA that receives; e 1: from shared memory
    BULK_STORE = 15  # c bytes; d 1: a reduction
    BULK_COMMIT = 16
    BULK_WAIT = 17  # a groups that may be open; d 1: only their reads
    SHARED_READ = 18  # c bytes; d passes through the banks; e clocks of the data's way (wavefronts)
    SHARED_WRITE = 19  # the same
    SHARED_ATOMIC = 20  # the same
    GLOBAL_READ = 21  # c bytes; d sectors of 32 bytes
    GLOBAL_WRITE = 22  # the same
    GLOBAL_ATOMIC = 23  # the same
    COPY_ASYNC = 24  # c bytes; d sectors read; e wavefronts written
    COPY_ARRIVE = 25  # a, b barrier; c arrivals; d 1: noinc
    COPY_COMMIT = 26
    COPY_WAIT = 27  # a groups that may be open
    WORK_ID = 28  # clusterlaunchcontrol.try_cancel; a, b barrier; c bytes; d CTA that receives


#: "pair": on the tensor cores of two CTAs. "a_elsewhere": A is not in shared memory. "warpgroup":
#: each of four warps forms its part.
MMA_FLAGS = {
    "pair": 1, "a_elsewhere": 2, "accumulates": 4, "tf32": 8, "f8": 16, "warpgroup": 32,
}  # fmt: skip

#: Fields of an event: index of the statement in the warp's sequence, its number in the kernel, ...
FIELDS = ("step", "statement", "kind", "a", "b", "c", "d", "e")


@attrs.frozen(eq=False)
class WarpTrace:
    """What one warp did.

    Attributes:
        cta: Linear index of its CTA, in the order in which clusters started.
        warp: Its number in the CTA.
        runs: (n, 2) int32: number of a statement, and how many were executed from it on.
        events: (n, 8) int32: `FIELDS`.
    """

    cta: int
    warp: int
    runs: np.ndarray
    events: np.ndarray

    def statements(self) -> np.ndarray:
        """Numbers of the statements in the order of their execution."""
        first, length = self.runs.T
        begin = np.repeat(first - (np.cumsum(length) - length), length)
        return begin + np.arange(length.sum())


@attrs.frozen(eq=False)
class Trace:
    """What a launch did.

    Attributes:
        lines: (statements,) int32: the line of each statement in the PTX text, from 1.
        warps: In the order in which they began.
    """

    lines: np.ndarray
    warps: tuple[WarpTrace, ...]


def read_trace(words: np.ndarray) -> Trace:
    """The trace that the core serialised as int32 words."""
    at = 0

    def take(count: int) -> np.ndarray:
        nonlocal at
        at += count
        return words[at - count : at]

    lines = take(int(take(1)[0]))
    warps = []
    for _ in range(int(take(1)[0])):
        cta, warp, runs, events = map(int, take(4))
        found = take(2 * runs).reshape(runs, 2)
        warps.append(WarpTrace(cta, warp, found, take(8 * events).reshape(events, 8)))
    return Trace(lines, tuple(warps))
