"""All kernels of the suite, in one list."""

from __future__ import annotations

from kernels import (
    clusters,
    elementwise,
    gemm_pair,
    gemm_sm90,
    gemm_sm100,
    overlap,
    persistent,
    pipelines,
    reduction,
    tensor_cores,
    tma,
    tmem,
    warp_mma,
)
from kernels.case import Case

MODULES = (
    elementwise, reduction, tma, pipelines, clusters, warp_mma, persistent, tmem, gemm_sm100,
    overlap, gemm_pair, gemm_sm90, tensor_cores,
)  # fmt: skip
CASES: list[Case] = [case for module in MODULES for case in module.CASES]
BY_NAME = {case.name: case for case in CASES}
assert len(BY_NAME) == len(CASES), "two cases share a name"
