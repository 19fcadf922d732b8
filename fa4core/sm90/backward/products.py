"""The products of a consumer warpgroup, and their operands in shared memory.

S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q and dQ = dS K. Every tile is stored once,
row-major: where rows are what is summed over, wgmma reads it transposed.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as sm90
from cutlass import cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from fa4core.pipeline.effects import Fixed
from fa4core.sm90.backward.spec import ROWS, Spec
from fa4core.sm90.memory import dtype_of, transposed

K_MAJOR, MN_MAJOR = OperandMajorMode.K, OperandMajorMode.MN
SMEM, RMEM = warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM


class Product(Fixed):
    """A product of 64 rows and `columns`; `a`, `b` and `source` say how operands lie."""

    def __init__(self, dtype: Any, columns: int, a: Any, b: Any, source: Any = SMEM):
        self.dtype, self.columns, self.a, self.b, self.source = dtype, columns, a, b, source

    def product(self) -> cute.TiledMma:
        """A fresh one."""
        return sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, self.a, self.b, cutlass.Float32, (1, 1, 1),
            (ROWS, self.columns), self.source,
        )  # fmt: skip

    def sums(self) -> cute.Tensor:
        """An accumulator."""
        shape = self.product().partition_shape_C((ROWS, self.columns))
        return cute.make_rmem_tensor(shape, cutlass.Float32)

    def of_a(self, tile: cute.Tensor) -> cute.Tensor:
        """Fragment of operand A, (64, summed over, ...) in shared memory."""
        product = self.product()
        return product.make_fragment_A(product.get_slice(0).partition_A(tile))

    def of_b(self, tile: cute.Tensor, number: Any = 0) -> cute.Tensor:
        """Fragment of operand B, of (rows, summed over, ...) in shared memory `columns` rows from
        their `number`-th piece on."""
        product, shape = self.product(), (self.columns, cute.size(tile, mode=[1]))
        return product.make_fragment_B(
            product.get_slice(0).partition_B(_piece(tile, shape, number))
        )

    def begin(
        self, sums: cute.Tensor, a: cute.Tensor, b: cute.Tensor, add: bool, steps: Any = None
    ) -> None:
        """sums = a b, or sums += a b, begun; over some of the steps of 16 that are summed over."""
        product = self.product()
        warpgroup.fence()
        for step in range(cute.size(b, mode=[2])) if steps is None else steps:
            product.set(warpgroup.Field.ACCUMULATE, add or step > 0)
            cute.gemm(product, sums, a[(None, None, step)], b[(None, None, step)], sums)
        warpgroup.commit_group()


class Products(Fixed):
    """See the module; S and dP are products of one kind."""

    def __init__(self, spec: Spec):
        self.spec, dtype = spec, dtype_of(spec)
        source = RMEM if spec.parts == 1 else SMEM
        self.scores = Product(dtype, spec.queries // spec.parts, K_MAJOR, K_MAJOR)
        self.grad_v = Product(dtype, spec.d_v // spec.parts, K_MAJOR, MN_MAJOR, source)
        held = RMEM if spec.held else SMEM
        self.grad_k = Product(dtype, spec.d // spec.parts, K_MAJOR, MN_MAJOR, held)
        self.grad_q = Product(dtype, spec.grad_q_columns, MN_MAJOR, MN_MAJOR)

    def weights(self) -> cute.Tensor | None:
        """P as operand of dV, if that is in registers."""
        return self._left(self.grad_v)

    def held(self) -> cute.Tensor | None:
        """dS as operand of dK likewise."""
        return self._left(self.grad_k)

    def _left(self, product: Product) -> cute.Tensor | None:
        if product.source == SMEM:
            return None
        of = product.product()
        return of.make_fragment_A(of.partition_shape_A((ROWS, self.spec.queries)))


class Operands(Fixed):
    """Operands of warpgroup `t`, all stages of them.

    Args:
        spec, products: What is multiplied.
        t: Number of the warpgroup.
        k, v: (64, d, tiles).
        q, out: (queries, d, stages).
        grad_s: (64, queries, tiles, stages).
        p: Likewise, if P is in shared memory.
    """

    def __init__(self, spec: Spec, products: Products, t, k, v, q, out, grad_s, p):
        tile, part = spec.tile_of(t), spec.part_of(t)
        scores, grad_q, passes = products.scores, products.grad_q, spec.shape.passes
        self._k, self._v = (scores.of_a(x[(None, None, tile)]) for x in (k, v))
        self._q, self._out = (scores.of_b(x, part) for x in (q, out))
        self._p = None if p is None else products.grad_v.of_a(p[(None, None, 0, None)])
        self._out_summed = products.grad_v.of_b(transposed(out), part)
        self._grad_s = None
        if not spec.held:
            self._grad_s = products.grad_k.of_a(grad_s[(None, None, tile, None)])
        self._q_summed = products.grad_k.of_b(transposed(q), part)
        rows = _piece(transposed(grad_s), (ROWS, ROWS), t if spec.by_rows else 0)
        self._rows = _over_tiles(grad_q.of_a(rows))
        first = 0 if spec.by_rows else t * passes
        self._columns = [_over_tiles(grad_q.of_b(transposed(k), first + n)) for n in range(passes)]

    def scores(self, stage: Any) -> tuple[cute.Tensor, cute.Tensor]:
        return self._k, self._q[(None, None, None, stage)]

    def grad_weights(self, stage: Any) -> tuple[cute.Tensor, cute.Tensor]:
        return self._v, self._out[(None, None, None, stage)]

    def add_v(self, p_stage: Any, stage: Any) -> tuple[cute.Tensor | None, cute.Tensor]:
        """P only if it is in shared memory."""
        p = None if self._p is None else self._p[(None, None, None, p_stage)]
        return p, self._out_summed[(None, None, None, stage)]

    def add_k(self, stage: Any, q_stage: Any) -> tuple[cute.Tensor | None, cute.Tensor]:
        """dS only if that is not held in registers."""
        grad_s = None if self._grad_s is None else self._grad_s[(None, None, None, stage)]
        return grad_s, self._q_summed[(None, None, None, q_stage)]

    def grad_q(self, stage: Any, part: int) -> tuple[cute.Tensor, cute.Tensor]:
        return self._rows[(None, None, None, stage)], self._columns[part]


def _piece(tensor: cute.Tensor, shape: tuple[int, int], number: Any) -> cute.Tensor:
    """A piece of the first two modes, `number` along the first."""
    rest = (None,) * (cute.rank(tensor) - 2)
    return cute.local_tile(tensor, shape, (number, 0, *rest))


def _over_tiles(fragment: cute.Tensor) -> cute.Tensor:
    """A fragment whose third mode goes over all keys, of all tiles."""
    return cute.group_modes(fragment, 2, 4)
