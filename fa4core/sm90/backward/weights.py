"""Elementwise arithmetic of a consumer thread: P from scores, dS from dP; see `fragments`."""

from __future__ import annotations

import math

import cutlass
from cutlass import cute

from fa4core.reference.exp2 import emulated
from fa4core.sm90.backward.spec import Spec
from fa4core.sm90.fragments import fma, polynomial_exp2

LOG2E = math.log2(math.e)


def weigh(spec: Spec, scores: cute.Tensor, lse: cute.Tensor, factor: cutlass.Float32) -> None:
    """scores[i] = 2^(factor * scores[i] - lse of its query).

    Args:
        spec: A share of each key's exponentials is a polynomial's.
        scores: A thread's accumulator.
        lse: (2, pairs) of the thread's queries, log2 domain, wherever they are.
        factor: Of scores to the log2 domain.
    """
    for pair in range(cute.size(lse, mode=[1])):
        of_pair = _loaded(lse[(None, pair)])
        for i in range(4 * pair, 4 * pair + 4):
            x = fma(scores[i], factor, -of_pair[i % 2])
            if emulated(2 * pair + i % 2, spec.exp.fraction):
                scores[i] = polynomial_exp2(x, spec.exp.degree)
            else:
                scores[i] = cute.math.exp2(x, fastmath=True)


def grad_values(grads: cute.Tensor, weights: cute.Tensor, delta: cute.Tensor) -> None:
    """grads[i] = weights[i] * (grads[i] - delta of its query); arguments as of `weigh`."""
    for pair in range(cute.size(delta, mode=[1])):
        of_pair = _loaded(delta[(None, pair)])
        for i in range(4 * pair, 4 * pair + 4):
            grads[i] = weights[i] * (grads[i] - of_pair[i % 2])


def _loaded(pair: cute.Tensor) -> cute.Tensor:
    """In registers, just before it is used: ptxas judges by this order whether there are enough."""
    loaded = cute.make_rmem_tensor(cute.make_layout(2), cutlass.Float32)
    cute.autovec_copy(pair, loaded)
    return loaded
