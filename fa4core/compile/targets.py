"""The GPUs that kernels are compiled for and emulated on, as values: no driver is asked.

Limits per SM, CTA and thread are those of the CUDA programming guide's table of technical
specifications per compute capability. Names, SM counts and cache sizes come from
`fa4core.plan.target`, the one home of the numbers that plans are made from. Used by the compiler
front and the emulator.
"""

from __future__ import annotations

import attrs

from fa4core.plan import target as planned


@attrs.frozen
class Target:
    """One GPU model. Sizes are bytes."""

    name: str  # "sm100": what users write
    arch: str  # "sm_100a": what the compiler is told; the suffix a unlocks tcgen05 and wgmma
    device_name: str
    compute_capability: tuple[int, int]
    num_sms: int
    clock_ghz: float
    l2_bytes: int
    smem_per_cta: int  # after opting in
    smem_per_sm: int = 233_472  # 228 KB
    smem_reserved_per_cta: int = 1_024  # taken by the system from each CTA's share
    registers_per_sm: int = 65_536
    registers_per_thread: int = 255
    threads_per_sm: int = 2_048
    threads_per_cta: int = 1_024
    ctas_per_sm: int = 32
    warps_per_sm: int = 64
    tmem_columns: int = 0  # of 128 lanes x 32 bit
    max_cluster: int = 16  # 8 without opting in to non-portable sizes

    @property
    def has_tcgen05(self) -> bool:
        return self.tmem_columns > 0

    @property
    def has_wgmma(self) -> bool:
        return self.compute_capability[0] == 9


def _device(
    plan: planned.Target, compute_capability: tuple[int, int], tmem_columns: int = 0
) -> Target:
    rates = plan.measured
    return Target(
        name=plan.name,
        arch=plan.arch,
        device_name=plan.title,
        compute_capability=compute_capability,
        num_sms=rates.sms,
        clock_ghz=rates.clock_ghz,
        l2_bytes=rates.l2_bytes,
        smem_per_cta=plan.smem_per_cta,
        tmem_columns=tmem_columns,
    )


SM90 = _device(planned.SM90, (9, 0))
SM100 = _device(planned.SM100, (10, 0), tmem_columns=512)
SM103 = _device(planned.SM103, (10, 3), tmem_columns=512)

TARGETS = {target.name: target for target in (SM90, SM100, SM103)}


def resolve(target: str | Target) -> Target:
    """A target from its name; "sm_100a" and "SM100" name the same one as "sm100"."""
    if isinstance(target, Target):
        return target
    name = target.lower().replace("_", "").rstrip("af") if isinstance(target, str) else None
    if name not in TARGETS:
        raise ValueError(f"unknown target {target!r}; known: {', '.join(sorted(TARGETS))}")
    return TARGETS[name]
