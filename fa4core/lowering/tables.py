"""Captured tensors on the host, and bounds of what indexing them can yield.

`Tables` converts every captured tensor once. Exact indices are looked up; index ranges are
answered from a pyramid of minima and maxima over blocks of 1, 2, 4, 8, ... elements in every
dimension that is ranged over: the answer covers the range, rounded outwards to whole blocks of
about a quarter of its length. Used by `bounds`; knows captures and nothing of attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fa4core.lowering.ranges import Array, Range, forget, unknown
from primitives.expr import Capture

_BLOCKS = 4  # a range is covered by about this many blocks in each dimension
_LARGE = 1 << 24  # from this many elements on, blocks of 2 and 4 are not worth their memory


class Pyramid:
    """Minima and maxima of `array` over aligned blocks of its last `ranged` dimensions."""

    def __init__(self, array: np.ndarray, ranged: int) -> None:
        self.ranged = ranged
        self.levels: dict[int, tuple[np.ndarray, np.ndarray]] = {0: (array, array)}
        level, step = (3, 3) if array.size >= _LARGE else (1, 1)
        lo = hi = array
        while max(lo.shape[lo.ndim - ranged :], default=1) > 1:
            for axis in range(lo.ndim - ranged, lo.ndim):
                lo, hi = (
                    _reduced(lo, axis, 1 << step, np.minimum),
                    _reduced(hi, axis, 1 << step, np.maximum),
                )
            self.levels[level] = (lo, hi)
            level, step = level + 1, 1

    def query(
        self, fixed: Sequence[Array], first: Sequence[Array], last: Sequence[Array]
    ) -> tuple[Array, Array]:
        """Minimum and maximum over `[first, last]` in the ranged dimensions, `fixed` in others."""
        length = np.maximum.reduce(
            np.broadcast_arrays(*[z - a + 1 for a, z in zip(first, last, strict=True)])
        )
        wanted = np.ceil(np.log2(np.maximum(length / _BLOCKS, 1))).astype(np.int64)
        shape = np.broadcast_shapes(length.shape, *(np.shape(f) for f in fixed))
        known = sorted(self.levels)
        choice = np.searchsorted(known, np.minimum(wanted, known[-1]))
        least, greatest = int(choice.min(initial=0)), int(choice.max(initial=0))
        if choice.size and int(choice.min()) == greatest:
            return self._query_level(known[greatest], fixed, first, last)
        arrays = [np.broadcast_to(x, shape) for x in (*fixed, *first, *last)]
        choice = np.broadcast_to(choice, shape)
        dtype = self.levels[0][0].dtype
        lo, hi = np.empty(shape, dtype), np.empty(shape, dtype)
        for c in range(least, greatest + 1):
            here = choice == c
            picked = [x[here] for x in arrays]
            ends = len(fixed), len(fixed) + self.ranged
            lo[here], hi[here] = self._query_level(
                known[c], picked[: ends[0]], picked[ends[0] : ends[1]], picked[ends[1] :]
            )
        return lo, hi

    def _query_level(
        self, level: int, fixed: Sequence[Array], first: Sequence[Array], last: Sequence[Array]
    ) -> tuple[Array, Array]:
        begin = [np.asarray(a) >> level for a in first]
        end = [np.asarray(z) >> level for z in last]
        counts = [int((e - b).max(initial=0)) + 1 for b, e in zip(begin, end, strict=True)]
        low, high = self.levels[level]
        lo: Array = None
        hi: Array = None
        for step in itertools.product(*(range(c) for c in counts)):
            # beyond the end of a shorter range its last block is read again, which changes nothing
            index = tuple(np.minimum(b + s, e) for b, e, s in zip(begin, end, step, strict=True))
            below, above = low[(*fixed, *index)], high[(*fixed, *index)]
            lo = below if lo is None else np.minimum(lo, below)
            hi = above if hi is None else np.maximum(hi, above)
        return lo, hi


class Tables:
    """The captured tensors of one analysis, on the host."""

    def __init__(self) -> None:
        self._arrays: dict[Capture, np.ndarray] = {}
        self._pyramids: dict[tuple[Capture, tuple[int, ...]], Pyramid] = {}

    def array(self, capture: Capture) -> np.ndarray:
        """The tensor as a numpy array; float types numpy lacks become float32."""
        if capture not in self._arrays:
            tensor = capture.tensor
            if tensor is None:
                raise ValueError(
                    f"the mask was read from text and {capture} holds no tensor; pass `tensors` to "
                    "primitives.expr.parse"
                )
            tensor = tensor.detach().cpu()
            if tensor.dtype.is_floating_point and tensor.dtype not in (
                torch.float16,
                torch.float32,
                torch.float64,
            ):
                tensor = tensor.float()
            self._arrays[capture] = tensor.numpy()
        return self._arrays[capture]

    def gather(self, capture: Capture, indices: Sequence[Range]) -> Range:
        """The range of `tensor[indices]`; nothing is known where an index may be outside."""
        array = self.array(capture)
        if array.ndim == 0:
            return _typed(array[()], array[()], capture.kind)
        if array.size == 0:
            return unknown(capture.kind, np.broadcast_shapes(*(np.shape(i.lo) for i in indices)))
        if all(i.exact for i in indices):
            return self._exact(array, capture.kind, [i.lo for i in indices])
        outside: Any = False
        wrapped = []
        for index, size in zip(indices, array.shape, strict=True):
            if np.size(index.lo) and (np.min(index.lo) < 0 or np.max(index.hi) >= size):
                outside = outside | (index.lo < -size) | (index.hi >= size)
                wrapped.append(_wrap(index, size))
            else:
                wrapped.append(index)
        ranged = tuple(d for d, i in enumerate(wrapped) if not i.exact)
        lo, hi = self._pyramid(capture, array, ranged).query(
            [i.lo for i in wrapped if i.exact],
            [wrapped[d].lo for d in ranged],
            [wrapped[d].hi for d in ranged],
        )
        return forget(_typed(lo, hi, capture.kind), outside)

    def _exact(self, array: np.ndarray, kind: str, indices: Sequence[Array]) -> Range:
        outside: Any = False
        safe = []
        for given, size in zip(indices, array.shape, strict=True):
            index = np.asarray(given)
            if index.size and (index.min() < -size or index.max() >= size):
                outside = outside | (index < -size) | (index >= size)
            safe.append(np.clip(index, -size, size - 1) if np.any(outside) else index)
        value = array[tuple(safe)]
        return forget(_typed(value, value, kind), outside)

    def _pyramid(self, capture: Capture, array: np.ndarray, ranged: tuple[int, ...]) -> Pyramid:
        key = (capture, ranged)
        if key not in self._pyramids:
            fixed = [d for d in range(array.ndim) if d not in ranged]
            self._pyramids[key] = Pyramid(array.transpose(*fixed, *ranged), len(ranged))
        return self._pyramids[key]


def _reduced(array: np.ndarray, axis: int, width: int, operation: np.ufunc) -> np.ndarray:
    """Reduce runs of `width` along an axis, by slices: faster than reduceat for short runs."""

    def every(start: int) -> np.ndarray:
        return array[(slice(None),) * axis + (slice(start, None, width),)]

    result = every(0).copy()
    for start in range(1, min(width, array.shape[axis])):
        part = every(start)
        into = result[(slice(None),) * axis + (slice(part.shape[axis]),)]
        operation(into, part, out=into)
    return result


def _wrap(index: Range, size: int) -> Range:
    """Negative indices count from the end; a range on both sides of 0 becomes the whole."""
    if index.exact:
        value = np.clip(index.lo, -size, size - 1)
        return Range(np.where(value < 0, value + size, value))
    lo, hi = np.clip(index.lo, -size, size - 1), np.clip(index.hi, -size, size - 1)
    both = (lo < 0) & (hi >= 0)
    lo = np.where(both, 0, np.where(lo < 0, lo + size, lo))
    return Range(lo, np.where(both, size - 1, np.where(hi < 0, hi + size, hi)))


def _typed(lo: Array, hi: Array, kind: str) -> Range:
    dtype = {"bool": np.bool_, "int": np.int64, "float": np.float64}[kind]
    low: Array = np.asarray(lo).astype(dtype, copy=False)
    result = Range(low) if hi is lo else Range(low, np.asarray(hi).astype(dtype, copy=False))
    if kind != "float" or not np.isnan(low).any():
        return result
    return forget(result, np.isnan(low) | np.isnan(result.hi))
