"""A kernel that is nothing but the mods of the backward pass: one tile, a thread for each key."""

from __future__ import annotations

import attrs
import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute

from fa4core.backward.mods import GradMods
from fa4core.backward.rowwise import loaded, piece
from fa4core.backward.spec import BackwardSpec
from fa4core.backward.work import Item

KEYS, QUERIES = 128, 64


@attrs.frozen(slots=False)
class Spec(BackwardSpec):
    partial: bool = attrs.field(kw_only=True)


@cute.kernel
def tile_kernel(spec: cutlass.Constexpr, values, grads, captured, grad_captured, lengths, place):
    thread, _, _ = cute.arch.thread_idx()
    fields = {name: cutlass.Int32(0) for name in attrs.fields_dict(Item)}
    fields |= {"b": place[0], "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    item, head, first = Item(**fields), place[1], place[2]
    mods = GradMods(spec, captured, grad_captured)
    of_values, of_grads = (piece(t, (thread,), 0, QUERIES) for t in (values, grads))
    raw, ds, s = loaded(of_values), loaded(of_grads), loaded(of_values)
    scale = cutlass.Float32(0.5)
    key = place[3] + thread
    mods.apply(s, item, head, key, first, spec.partial, scale)
    mods.differentiate(raw, ds, item, head, key, first, spec.partial, scale)
    cute.autovec_copy(s, of_values)
    cute.autovec_copy(ds, of_grads)


@cute.jit
def tile(
    values: cute.Tensor,
    grads: cute.Tensor,
    captured: tuple,
    grad_captured: tuple,
    lengths: cute.Tensor,
    place: cute.Tensor,
    stream: cuda.CUstream,
    spec: cutlass.Constexpr,
):
    """values, grads: (keys, queries) float32, in and out; lengths: of queries and keys; place: b,
    h, first query, first key."""
    tile_kernel(spec, values, grads, captured, grad_captured, lengths, place).launch(
        grid=[1, 1, 1], block=[KEYS, 1, 1], stream=stream
    )
