"""Warp-level matrix work: ldmatrix, mma.sync, stmatrix (all targets have them)."""

from __future__ import annotations

import cutlass
import torch
from cutlass import cute
from cutlass.cute.nvgpu import warp as warp_ops

from kernels.case import Case
from kernels.gemm_sm100 import operand, product

M, N, K = 32, 32, 64


@cute.kernel
def _warp_kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, mma: cute.TiledMma):
    """One warp: global -> shared (swizzled) -> ldmatrix -> mma.sync -> stmatrix -> global."""
    lane, _, _ = cute.arch.thread_idx()
    dtype = a.element_type
    smem = cutlass.memory.SmemAllocator()
    atom = cute.make_layout((8, 64), stride=(64, 1))
    swizzle = cute.make_swizzle(3, 4, 3)
    s_a = smem.allocate_tensor(
        dtype, cute.tile_to_shape(atom, (M, K), (0, 1)), 128, swizzle=swizzle
    )
    s_b = smem.allocate_tensor(
        dtype, cute.tile_to_shape(atom, (N, K), (0, 1)), 128, swizzle=swizzle
    )
    s_c = smem.allocate_tensor(dtype, cute.make_layout((M, N), stride=(N + 8, 1)), 128)
    for index in cutlass.range(lane, M * K, 32):
        s_a[index % M, index // M] = a[index % M, index // M]
        s_b[index % N, index // N] = b[index % N, index // N]
    cute.arch.sync_warp()

    mine = mma.get_slice(lane)
    f_a = mma.make_fragment_A(mine.partition_A(s_a))
    f_b = mma.make_fragment_B(mine.partition_B(s_b))
    acc = cute.make_rmem_tensor(mma.partition_shape_C((M, N)), cutlass.Float32)
    acc.fill(0.0)
    load = cute.make_copy_atom(warp_ops.LdMatrix8x8x16bOp(False, 4), dtype)
    copy_a, copy_b = cute.make_tiled_copy_A(load, mma), cute.make_tiled_copy_B(load, mma)
    cute.copy(copy_a, copy_a.get_slice(lane).partition_S(s_a), copy_a.get_slice(lane).retile(f_a))
    cute.copy(copy_b, copy_b.get_slice(lane).partition_S(s_b), copy_b.get_slice(lane).retile(f_b))
    for block in cutlass.range_constexpr(cute.size(f_a, mode=[2])):
        cute.gemm(mma, acc, f_a[(None, None, block)], f_b[(None, None, block)], acc)

    rounded = cute.make_rmem_tensor(acc.layout, dtype)
    rounded.store(acc.load().to(dtype))
    store = cute.make_copy_atom(warp_ops.StMatrix8x8x16bOp(False, 4), dtype)
    copy_c = cute.make_tiled_copy_C(store, mma)
    cute.copy(
        copy_c, copy_c.get_slice(lane).retile(rounded), copy_c.get_slice(lane).partition_D(s_c)
    )
    cute.arch.sync_warp()
    for index in cutlass.range(lane, M * N, 32):
        c[index // N, index % N] = s_c[index // N, index % N]


@cute.jit
def warp_gemm(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    operation = warp_ops.MmaF16BF16Op(a.element_type, cutlass.Float32, (16, 8, 16))
    mma = cute.make_tiled_mma(operation, permutation_mnk=(16, 16, 16))
    _warp_kernel(a, b, c, mma).launch(grid=[1, 1, 1], block=[32, 1, 1])


def _case(dtype: torch.dtype, target: str) -> Case:
    return Case(
        f"mma.sync {str(dtype).removeprefix('torch.')} {target}", warp_gemm,
        lambda: (operand(M, K, dtype), operand(N, K, dtype)),
        lambda: (torch.empty(M, N, dtype=dtype),), product, target=target, tolerance=5e-3,
    )  # fmt: skip


CASES = [_case(torch.bfloat16, "sm100"), _case(torch.float16, "sm90")]
