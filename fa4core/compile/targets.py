"""The GPUs that kernels are compiled for, as values: no driver is asked.

Limits per SM, CTA and thread are those of the CUDA programming guide's table of technical
specifications per compute capability; clocks, SM counts and unit rates are those of the data
sheets and of the FlashAttention-4 paper (section 2). A field marked "assumed" has no public
source. Used by the compiler front, the emulator, the planner and the models.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Target:
    """One GPU model. Sizes are bytes, rates are per SM and clock."""

    name: str  # "sm100": what users write
    arch: str  # "sm_100a": what the compiler is told; the suffix a unlocks tcgen05 and wgmma
    device_name: str
    compute_capability: tuple[int, int]
    num_sms: int
    clock_ghz: float
    l2_bytes: int
    mma_flops: int  # dense bf16
    exp_rate: int  # MUFU operations
    smem_per_cta: int = 232_448  # 227 KB, after opting in
    smem_per_sm: int = 233_472  # 228 KB
    smem_reserved_per_cta: int = 1_024  # taken by the system from each CTA's share
    smem_read_rate: int = 128
    registers_per_sm: int = 65_536
    registers_per_thread: int = 255
    threads_per_sm: int = 2_048
    threads_per_cta: int = 1_024
    ctas_per_sm: int = 32
    warps_per_sm: int = 64
    tmem_columns: int = 0  # of 128 lanes x 32 bit
    max_cluster: int = 16  # 8 without opting in to non-portable sizes
    fma_lanes: int = 128

    @property
    def has_tcgen05(self) -> bool:
        return self.tmem_columns > 0

    @property
    def has_wgmma(self) -> bool:
        return self.compute_capability[0] == 9

    @property
    def peak_tflops(self) -> float:
        """Dense bf16 matrix throughput of the whole GPU."""
        return self.mma_flops * self.num_sms * self.clock_ghz / 1e3


SM90 = Target(
    name="sm90",
    arch="sm_90a",
    device_name="NVIDIA H200",
    compute_capability=(9, 0),
    num_sms=132,
    clock_ghz=1.83,
    l2_bytes=50 * 2**20,
    mma_flops=4_096,
    exp_rate=16,
)

SM100 = Target(
    name="sm100",
    arch="sm_100a",
    device_name="NVIDIA B200",
    compute_capability=(10, 0),
    num_sms=148,
    clock_ghz=1.85,
    l2_bytes=126 * 2**20,
    mma_flops=8_192,
    exp_rate=16,
    tmem_columns=512,
)

SM103 = attrs.evolve(
    SM100,
    name="sm103",
    arch="sm_103a",
    device_name="NVIDIA B300",
    compute_capability=(10, 3),
    exp_rate=32,
    # num_sms and clock_ghz: assumed equal to the B200's
)

TARGETS = {target.name: target for target in (SM90, SM100, SM103)}


def resolve(target: str | Target) -> Target:
    """A target from its name; "sm_100a" and "SM100" name the same one as "sm100"."""
    if isinstance(target, Target):
        return target
    name = target.lower().replace("_", "").rstrip("af")
    if name not in TARGETS:
        raise ValueError(f"unknown target {target!r}; known: {', '.join(sorted(TARGETS))}")
    return TARGETS[name]
