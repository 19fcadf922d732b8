"""The short way through `attention`: a call that was prepared before runs again at once.

Calls are found by what their tensors are (shape, strides, dtype, device), never by what they hold.
Tensors that a plan was made from, captured ones and those of a layout, are compared by identity,
address and version: torch raises the version at every in-place change. Whatever wants to see
operators (torch.compile, autograd, functorch, modes, tensor subclasses) takes the long way,
`fa4core.ops`. Prepared calls live as long as their variant, the newest `MOST` of them.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from typing import Any

import attrs
import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

from fa4core import ops
from fa4core.backends import backend_of
from fa4core.compile.aot import Exported
from fa4core.prepared import Prepared
from fa4core.reference.tiled import Call
from fa4core.variant import Variant
from primitives.expr import captures
from primitives.sequence import Layout

MOST = 64  # prepared calls of one variant

Tensor = torch.Tensor

_PLAIN = (Tensor, Parameter)
_VARIANTS = (Variant, Exported)


@attrs.frozen(eq=False)
class _Kept:
    """A prepared call and what it depends on.

    Attributes:
        prepared: The call.
        watched: (tensor, address, version); version -1 where the kernel itself reads the values.
        held: Tensors whose `id` is part of the key: alive, so that no other gets it.
    """

    prepared: Prepared
    watched: tuple[tuple[Tensor, int, int], ...]
    held: tuple[Tensor, ...]

    @property
    def is_current(self) -> bool:
        for tensor, address, version in self.watched:
            if tensor.data_ptr() != address or (version >= 0 and tensor._version != version):
                return False
        return True


_kept: weakref.WeakKeyDictionary[Variant | Exported, OrderedDict[tuple, _Kept]] = (
    weakref.WeakKeyDictionary()
)


PADDED = Layout()  # of calls without a layout

_SCALES = (float, int, type(None))


def key_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variant | Exported,
    layout: Layout,
    scale: float | None,
    backend: str,
) -> tuple | None:
    """What a prepared call is found by, or None: take the long way. Arguments may be anything."""
    if torch.compiler.is_compiling() or backend == "reference" or _is_watched((q, k, v)):
        return None
    if type(variant) not in _VARIANTS or type(layout) is not Layout or type(scale) not in _SCALES:
        return None
    if backend == "auto" and not _has_kernels(q.device):
        return None
    if torch.is_grad_enabled() and _wants_grad(q, k, v, variant):
        return None
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16,
        scale, backend, None if layout is PADDED else _places(layout),
    )  # fmt: skip


def _is_watched(tensors: tuple[Tensor, ...]) -> bool:
    """Whether somebody may want to see the operator, not only its result."""
    for tensor in tensors:
        if type(tensor) not in _PLAIN or tensor.is_neg():
            return True
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return True
    transforms = torch._C._functorch.peek_interpreter_stack()
    return transforms is not None or forward_ad._current_level >= 0


def _wants_grad(q: Tensor, k: Tensor, v: Tensor, variant: Variant | Exported) -> bool:
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    return any(tensor.requires_grad for tensor in variant.arguments)


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    return backend_of(device) is not None


def _places(layout: Layout) -> tuple:
    """A layout's tensors by identity: a new layout of the same tensors is the same."""
    return (
        id(layout.cu_seqlens_q), id(layout.cu_seqlens_k), id(layout.seqused_q),
        id(layout.seqused_k), id(layout.page_table), layout.max_seqlen_q, layout.max_seqlen_k,
    )  # fmt: skip


def find(variant: Variant | Exported, key: tuple) -> Prepared | None:
    """The call that was kept under a key, if it still holds."""
    calls = _kept.get(variant)
    kept = None if calls is None else calls.get(key)
    return kept.prepared if kept is not None and kept.is_current else None


def keep(
    key: tuple,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    variant: Variant | Exported,
    layout: Layout,
    scale: float | None,
    backend: str,
) -> Prepared | None:
    """Prepare a call and keep it; None if it takes the reference or can't be watched.

    Raises:
        TypeError, ValueError, IndexError, NotImplementedError: As the operator.
    """
    held = tuple({id(t): t for t in layout.tensors.values()}.values())  # each once
    if any(type(t) not in _PLAIN or t.is_inference() for t in (*variant.arguments, *held)):
        return None  # tensors made in inference mode have no version
    call, chosen = ops.plan_call(q, k, v, variant.arguments, layout, variant.spec, scale, backend)
    if chosen == "reference":
        return None
    prepared = ops.prepared(call, chosen, q, k, v)
    calls = _kept.setdefault(variant, OrderedDict())
    calls[key] = _Kept(prepared, _watched(call, q.device, held), held)
    calls.move_to_end(key)
    while len(calls) > MOST:
        calls.popitem(last=False)
    return prepared


def _watched(call: Call, device: torch.device, held: tuple[Tensor, ...]) -> Any:
    """Tensors that a prepared call depends on, as they are now."""
    graph = call.program.graph
    on_host = set(captures(graph.mask))  # the tile map was made from their values
    found = [(tensor, tensor.data_ptr(), tensor._version) for tensor in held]
    for capture in graph.captures:
        tensor = capture.tensor
        assert tensor is not None
        read_in_place = (
            tensor.device == device
            and tensor.dtype != torch.bool
            and tensor.is_contiguous()
            and tensor.numel() > 0
        )
        version = -1 if read_in_place and capture not in on_host else tensor._version
        found.append((tensor, tensor.data_ptr(), version))
    return tuple(found)
