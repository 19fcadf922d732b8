"""The numbers of the modelled machine, each with where it is from.

Rates come from `fa4core.plan.target`, the home of hardware numbers. What is below are latencies and
policies. Few are published; the others are assumptions of the right order, marked so, and nothing
is fitted: the validation page of the docs shows what a change of each does to a prediction.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from fa4core.compile.sass import Instruction
from fa4core.plan.target import Rates, Target

SCHEDULERS = 4  # of an SM: CUDA programming guide, "Compute Capability 10.0"
WARP = 32

#: Pipes of the simulator, in its order.
UNITS = (
    "FMA", "ALU", "MUFU", "TMEM", "LSU", "tensor", "TMA", "barrier", "uniform", "control",
)  # fmt: skip


@attrs.frozen
class Parameters:
    """What the simulator is told; rates per clock, latencies in cycles. The core's machine.h has
    the same order.

    Attributes:
        mac: bf16 multiply-adds of an SM's tensor core. `Rates.mma` / 2.
        smem_bytes: Bytes that shared memory moves. `Rates.smem_bytes`.
        tmem_bytes: Bytes of tensor memory that a scheduler's warps move: a column of 32 lanes of
            32 bits a clock. Assumed.
        tma_bytes: Bytes that reach an SM from the L2 cache. Assumed.
        mma_latency: From the last product to the arrival that a commit makes. Assumed.
        tmem_load_latency: Of `tcgen05.ld` besides its transfer. Assumed.
        tmem_store_latency: Of `tcgen05.st` besides its transfer. Assumed.
        shared_latency: Of a shared load without conflicts. 20 to 30 cycles is what is stated for
            Hopper (the-dsvolk.github.io/ai-perf/ai-infra/memory_request_life.html).
        global_latency: Between an L2 hit, 222 to 339 cycles on an L40 (arXiv 2606.22588), and
            global memory, 400 to 800 (the page above). Such loads are few beside bulk copies.
        bulk_load_latency: From a bulk load to its first byte. An L2 hit as above, about 300 cycles
            more from the far half of a B200 (SemiAnalysis, "Dissecting Nvidia Blackwell", 2026)
            for every other byte, and what the unit itself takes, assumed to be 170.
        arrive_latency: From an arrival to the phase that it completes. Assumed.
        wait_latency: Until a test of a barrier is answered. Assumed to be that of a shared load.
        wake_latency: From a complete phase to a warp that sleeps for it. Assumed.
        retry_stalls: Stall counts between its sleep and its way back, in the retry that ptxas
            puts behind every wait: a second test and two branches.
        remote_latency: More, for the barrier of another CTA of the cluster. Assumed.
        barrier_latency: Of `bar.sync` after the last warp's arrival. Assumed.
        cluster_latency: Of a cluster barrier. Assumed, like `remote_latency`.
        operand_latency: Until operands of an asynchronous instruction are read. Assumed.
        work_id_latency: Of a cancellation request for the next work tile. Assumed.
        lsu_queue: Loads and stores of an SM that wait for shared memory before its schedulers hold
            back further ones. Assumed.
        jitter: Latencies vary by this share, up and down.
        greedy: Share of the clocks in which a scheduler goes on with the warp it issued last, if
            that can issue; in the others the next warp has its turn. Between "greedy then
            oldest" and "loose round robin" of the literature; the real policy is not published.
        dispatch_conflict: Share of the FMA, ALU and MUFU instructions that hold their scheduler for
            another clock, while the SM multiplies with accumulators in registers (Hopper): the
            dispatch stalls that Nsight Compute counted on an H200 for each issued instruction, by
            the share of the time in which the tensor core was busy; 0.41 in our forward kernel at
            head dim 128, 0.58 in FlashAttention-4's.
        warp_skew: Cycles over which the warps of a CTA begin. Assumed.
    """

    mac: float
    smem_bytes: float
    tmem_bytes: float = 128
    tma_bytes: float = 64
    mma_latency: float = 40
    tmem_load_latency: float = 24
    tmem_store_latency: float = 16
    shared_latency: float = 24
    global_latency: float = 500
    bulk_load_latency: float = 600
    arrive_latency: float = 16
    wait_latency: float = 24
    wake_latency: float = 16
    retry_stalls: float = 17
    remote_latency: float = 180
    barrier_latency: float = 16
    cluster_latency: float = 180
    operand_latency: float = 12
    work_id_latency: float = 600
    lsu_queue: float = 16
    jitter: float = 0.15
    greedy: float = 0.5
    dispatch_conflict: float = 0.5
    warp_skew: float = 100

    @classmethod
    def of(cls, rates: Rates) -> Parameters:
        """Those of a GPU."""
        return cls(mac=rates.mma / 2, smem_bytes=rates.smem_bytes)


# Until the result of an instruction with a scoreboard is there, by opcode. Assumed; of the order
# that microbenchmarks of older GPUs find (arXiv 1804.06826). Latencies of FMA and ALU instructions
# are in the stall counts.
_LATENCY = {
    "MUFU": 20, "F2F": 20, "F2I": 20, "I2F": 20, "FRND": 20, "POPC": 20, "FLO": 20, "BREV": 20,
    "SHFL": 24, "REDUX": 24, "S2R": 24, "S2UR": 24, "CS2R": 12, "R2UR": 12, "LDC": 40, "LDCU": 40,
    "VOTE": 12, "VOTEU": 12, "MEMBAR": 30, "CCTL": 30, "FENCE": 12, "SYNCS": 24,
}  # fmt: skip
_OTHER_LATENCY = 16

# Under load, where that is known to differ from what the vendor says. An H200 runs these kernels at
# about 1.7 GHz one at a time, and at less in a row, as they were measured (docs/performance.md):
# this is the clock with which the model fits those measurements best, and the one fitted number.
_CLOCK_GHZ = {"sm90": 1.57}

_OP = {
    "LDS": "SharedRead", "LDSM": "SharedRead", "ATOMS": "SharedRead", "STS": "SharedWrite",
    "STSM": "SharedWrite", "STAS": "SharedWrite",
    "LDG": "GlobalRead", "LD": "GlobalRead", "ATOMG": "GlobalRead", "ATOM": "GlobalRead",
    "STG": "GlobalWrite", "ST": "GlobalWrite", "RED": "GlobalWrite", "REDG": "GlobalWrite",
    "LDTM": "TmemLoad", "STTM": "TmemStore", "UTCBAR": "Commit", "UTMALDG": "BulkLoad",
    "UBLKCP": "BulkLoad", "UTMASTG": "BulkStore", "UTMAREDG": "BulkStore", "UBLKRED": "BulkStore",
    "UTMACMDFLUSH": "BulkCommit", "UCGABAR_ARV": "ClusterArrive", "UCGABAR_WAIT": "ClusterWait",
    "LDGSTS": "CopyAsync", "ARRIVES": "CopyArrive", "UGETNEXTWORKID": "WorkId",
}  # fmt: skip
OPS = (
    "Plain", "SharedRead", "SharedWrite", "GlobalRead", "GlobalWrite", "TmemLoad", "TmemStore",
    "TmemFence", "SharedFence", "Mma", "Commit", "ProductWait", "BulkLoad", "BulkStore",
    "BulkCommit", "BulkWait", "MbarrierInit", "MbarrierArrive", "MbarrierWait", "BarrierSync",
    "BarrierArrive", "ClusterArrive", "ClusterWait", "CopyAsync", "CopyArrive", "CopyWait",
    "WorkId", "Exit",
)  # fmt: skip


def op_of(i: Instruction) -> str:
    """What the simulator does for an instruction."""
    if i.opcode == "SYNCS":
        for part, op in (("EXCH", "MbarrierInit"), ("PHASECHK", "MbarrierWait")):
            if part in i.modifiers:
                return op
        return "MbarrierArrive" if "ARRIVE" in i.modifiers else "Plain"
    if i.opcode == "BAR":
        return "BarrierArrive" if "ARV" in i.modifiers else "BarrierSync"
    if i.opcode == "FENCE" and "ASYNC" in i.modifiers:
        return "TmemFence" if i.modifiers.endswith(".T") else "SharedFence"
    if i.opcode == "DEPBAR":
        return "BulkWait"
    if i.opcode == "WARPGROUP":
        return "ProductWait" if "DEPBAR" in i.modifiers else "Plain"
    return "Mma" if i.pipe == "tensor" else _OP.get(i.opcode, "Plain")


def clock_of(target: Target) -> float:
    """GHz that times are stated for unless another clock is asked for."""
    return _CLOCK_GHZ.get(target.name, target.measured.clock_ghz)


def groups_of(i: Instruction) -> int:
    """Of a wgmma: 1 if it ends a group. Of a wait for groups: how many may be open."""
    if i.opcode == "WARPGROUP" and "DEPBAR" in i.modifiers:
        return int(i.operands.rsplit(",", 1)[1], 16)
    return int(i.opcode == "HGMMA" and "gsb" in i.operands)


def latency_of(i: Instruction) -> int:
    """Cycles until its result is there, where the simulator does not find that out itself."""
    return _LATENCY.get(i.opcode, _OTHER_LATENCY)


def occupancy(i: Instruction, rates: Rates) -> tuple[str, int]:
    """The pipe of an instruction, and for how many clocks a warp occupies it."""
    lanes = {"FMA": rates.fma, "ALU": rates.alu, "MUFU": rates.mufu, "LSU": WARP}
    pipe = "FMA" if i.pipe == "FMA x2" else i.pipe
    if pipe in lanes:
        clocks = WARP * SCHEDULERS // lanes[pipe]
        return pipe, clocks * (2 if i.pipe == "FMA x2" else 1)
    return pipe, 2 if pipe == "uniform" else 1


def packed(parameters: Parameters) -> Iterable[float]:
    """As the core takes them."""
    return attrs.astuple(parameters)
