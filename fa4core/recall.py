"""What a call is found by that was prepared before, and what it depends on.

Calls are found by what their tensors are (shape, strides, dtype, device), never by what they hold.
In `attention`, whatever wants to see operators (torch.compile, functorch, modes, tensor subclasses)
takes the long way through `fa4core::forward`, which looks here, too. `fa4core.kept` has the calls.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

from fa4core.backends import backend_of
from fa4core.compile.aot import Exported
from fa4core.kept import Kept
from fa4core.reference.tiled import Call
from fa4core.variant import Variant
from primitives.expr import captures
from primitives.sequence import Layout

Tensor = torch.Tensor

_PLAIN = frozenset((Tensor, Parameter))
_VARIANTS = frozenset((Variant, Exported))

PADDED = Layout()  # of calls without a layout

_SCALES = frozenset((float, int, type(None)))


def is_open(
    q: Tensor, k: Tensor, v: Tensor, variant: Variant | Exported, layout: Layout, scale: Any
) -> bool:
    """Whether nobody wants to see the operator, only its result. Arguments may be anything."""
    return not (
        torch.compiler.is_compiling()
        or type(q) not in _PLAIN or type(k) not in _PLAIN or type(v) not in _PLAIN
        or type(variant) not in _VARIANTS or type(layout) is not Layout
        or type(scale) not in _SCALES
        or q.is_neg() or k.is_neg() or v.is_neg()
        or torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )  # fmt: skip


def key_of(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float | None, backend: str
) -> tuple | None:
    """What a prepared call is found by; None where the reference computes it."""
    if type(backend) is not str or backend == "reference":
        return None
    if backend == "auto" and not _has_kernels(q.device):
        return None
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16,
        scale, backend, None if layout is PADDED else layout.identity,
        _emulated() if backend == "emulator" else None,
    )  # fmt: skip


def backward_key_of(
    key: tuple | None,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    deterministic: bool,
) -> tuple | None:
    """What a prepared backward pass is found by, besides the key of its forward pass."""
    if key is None:
        return None
    return (
        key, grad_out.stride(), out.stride(), (grad_out.data_ptr() | out.data_ptr()) % 16,
        grad_lse is None, deterministic,
    )  # fmt: skip


def _emulated() -> tuple[str, int] | None:
    """Target and SMs of the open session; calls are planned for them."""
    session = _session_module().current_session()
    return None if session is None else (session.target.name, session.num_sms)


@functools.cache
def _session_module() -> Any:
    """Imported on use: only the emulator's calls need it."""
    return importlib.import_module("fa4core.emulator.session")


def wants_grad(q: Tensor, k: Tensor, v: Tensor, captured: list[Tensor]) -> bool:
    """Whether autograd records the call."""
    if not torch.is_grad_enabled():
        return False
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    return any(tensor.requires_grad for tensor in captured)


@functools.cache
def _has_kernels(device: torch.device) -> bool:
    return backend_of(device) is not None


def can_be_kept(layout: Layout, captured: list[Tensor]) -> bool:
    """Whether changes of all these tensors can be seen: those of inference mode have no version."""
    tensors = (*captured, *layout.tensors.values())
    return all(type(t) in _PLAIN and not t.is_inference() for t in tensors)


def kept(prepared: Any, call: Call, layout: Layout, device: torch.device) -> Kept:
    """A prepared call with the tensors that it depends on, as they are now."""
    held = tuple({id(t): t for t in layout.tensors.values()}.values())  # each once
    on_host = set(captures(call.program.graph.mask))  # the tile map was made from their values
    found = [(tensor, tensor.data_ptr(), tensor._version) for tensor in held]
    for capture in call.program.captures:
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
    return Kept(prepared, tuple(found), held)
