"""A peer's forward kernel to compare with: a cubin, or FlashAttention-4's, compiled here.

FlashAttention-4 can compile without a GPU when its tensors are fake; nothing of it runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import itertools
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from fa4core.compile.artifact import Artifact
from fa4core.compile.cross import artifact_of
from fa4core.compile.environment import dsl_settings, import_dsl
from fa4core.compile.targets import Target
from fa4core.emulator.host.disguise import known_hardware
from fa4core.plan.problem import Problem
from fa4core.variant import Variant
from primitives import mask, score


def import_fa4() -> Any:
    """FlashAttention-4's interface module.

    Raises:
        ModuleNotFoundError: It is not installed; says how to get it.
    """
    if importlib.util.find_spec("flash_attn") is None:
        raise ModuleNotFoundError(
            "FlashAttention-4 is not installed: pip install flash-attn-4 (Linux only), or give a "
            "cubin as --peer FILE"
        )
    import_dsl()
    _stand_in_for_triton()
    from flash_attn.cute import interface

    return interface


def _stand_in_for_triton() -> None:
    """FA4 imports quack, whose autotuner imports triton; nothing of either runs here."""
    if importlib.util.find_spec("triton") is not None:
        return
    import torch._dynamo  # noqa: F401  (looks for a real triton when imported)

    triton: Any = types.ModuleType("triton")
    triton.__spec__ = importlib.util.spec_from_loader("triton", None)
    triton.runtime = types.SimpleNamespace(cache=types.SimpleNamespace(FileCacheManager=object))
    triton.jit = lambda function: function
    triton.language = types.ModuleType("triton.language")
    sys.modules["triton"], sys.modules["triton.language"] = triton, triton.language


def fa4_arguments(variant: Variant) -> dict[str, Any]:
    """What makes FlashAttention-4 compute a variant.

    Raises:
        NotImplementedError: No such arguments are known here.
    """
    masks: list[tuple[Any, dict[str, Any]]] = [(mask.full(), {}), (mask.causal(), {"causal": True})]
    if window := _numbers(r"sliding_window\((\d+), (\d+)\)", variant.mask.name):
        left, right = map(int, window)
        made, arguments = mask.sliding_window(left, right), {"window_size": (left, right)}
        masks.append((made, arguments))
        masks.append((mask.causal() & made, {"causal": True} | arguments))
    scores: list[tuple[Any, dict[str, Any]]] = [(Variant().score, {})]
    if cap := _numbers(r"softcap\(([\d.]+)\)", variant.score.name):
        scores.append((score.softcap(float(cap[0])), {"softcap": float(cap[0])}))
    for (made, arguments), (scored, more) in itertools.product(masks, scores):
        if _same(variant, Variant(mask=made, score=scored)):
            return arguments | more
    raise NotImplementedError(
        "--peer fa4 compares full, causal and windowed attention, with softcap or without, not "
        f"{variant.mask.name} with {variant.score.name}; compile the peer's kernel yourself and "
        "give its cubin: --peer FILE"
    )


def _numbers(pattern: str, name: str) -> tuple[str, ...] | None:
    found = re.search(pattern, name)
    return found.groups() if found else None


def _same(a: Variant, b: Variant) -> bool:
    """Whether two variants compute the same, whatever they are called."""
    return a.graph.dump() == b.graph.dump() and all(
        torch.equal(x, y) for x, y in zip(a.arguments, b.arguments, strict=True)
    )


def compile_fa4(variant: Variant, problem: Problem, target: Target) -> Artifact:
    """FlashAttention-4's forward kernel for a call, compiled anew each time.

    Raises:
        ModuleNotFoundError, NotImplementedError: As `import_fa4` and `fa4_arguments`.
    """
    call = _calling(variant, problem, target)
    compiled: list[Any] = []
    with dsl_settings(target, observer=compiled.append), fa4_asked_anew():
        call()
    (forward,) = compiled
    return artifact_of(forward, target)


class _Chosen(Exception):
    """Carries what a kernel would have been made with."""


def fa4_options(variant: Variant, problem: Problem, target: Target) -> dict[str, Any]:
    """What FlashAttention-4 makes its forward kernel for a call with: tiles, CTAs, scheduler.

    Compiles nothing.

    Raises:
        ModuleNotFoundError, NotImplementedError: As `import_fa4` and `fa4_arguments`.
    """

    def chosen(options: dict[str, Any]) -> None:
        raise _Chosen(options)

    call = _calling(variant, problem, target)
    try:
        with dsl_settings(target), fa4_asked_anew(chosen):
            call()
    except _Chosen as found:
        return found.args[0]
    raise NotImplementedError("FlashAttention-4 takes none of its usual forward kernels here")


@contextlib.contextmanager
def fa4_asked_anew(
    told: Callable[[dict[str, Any]], None] | None = None, kernels: dict | None = None
) -> Iterator[None]:
    """For a while, FlashAttention-4 knows no GPU and no kernel from before, nor keeps any.

    Args:
        told: What each forward kernel is about to be made with.
        kernels: Where it finds and keeps them meanwhile.
    """
    interface = import_fa4()
    kept: dict = {} if kernels is None else kernels
    names = ("FlashAttentionForwardSm90", "FlashAttentionForwardSm100")
    made = {} if told is None else {n: _telling(told, getattr(interface, n)) for n in names}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(interface._flash_attn_fwd, "compile_cache", kept))
        for name, replaced in made.items():
            stack.enter_context(mock.patch.object(interface, name, replaced))
        interface._get_device_arch.cache_clear()
        stack.callback(interface._get_device_arch.cache_clear)
        yield


def _telling(told: Callable[[dict[str, Any]], None], original: type) -> Callable[..., Any]:
    """A function in place of a class, which says what that is called with."""
    signatures = (inspect.signature(c) for c in original.__mro__)
    fields = next(tuple(s.parameters) for s in signatures if "args" not in s.parameters)

    def replaced(*given: Any, **options: Any) -> Any:
        told(dict(zip(fields, given, strict=False)) | options)
        return original(*given, **options)

    return replaced


def _calling(variant: Variant, problem: Problem, target: Target) -> Callable[[], None]:
    """A call of FlashAttention-4 with tensors that are not there: it compiles, and nothing runs."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments = fa4_arguments(variant)
    interface = import_fa4()
    p = problem
    unequal = len(set(zip(p.seqlens_q, p.seqlens_k, strict=True))) > 1
    if unequal or p.starts_q is not None or p.starts_k is not None or p.page_size is not None:
        raise NotImplementedError(
            "FlashAttention-4 is compared on sequences of one length, neither packed nor in pages; "
            "choose such a problem, or leave the peer out"
        )
    shapes = (
        (p.batch, max(p.seqlens_q), p.heads_q, p.head_dim),
        (p.batch, max(p.seqlens_k), p.heads_kv, p.head_dim),
        (p.batch, max(p.seqlens_k), p.heads_kv, p.head_dim_v),
    )

    def call() -> None:
        with (
            _environment(target),
            known_hardware(target, target.num_sms),
            FakeTensorMode(),
        ):
            q, k, v = (torch.empty(shape, dtype=p.dtype, device="cuda") for shape in shapes)
            interface.flash_attn_func(q, k, v, return_lse=True, **arguments)

    return call


@contextlib.contextmanager
def _environment(target: Target) -> Iterator[None]:
    """FA4 takes what it would ask a GPU for from variables."""
    major, minor = target.compute_capability
    found = {
        "FLASH_ATTENTION_ARCH": f"sm_{major * 10 + minor}",
        "FLASH_ATTENTION_NUM_SMS": str(target.num_sms),
    }
    with mock.patch.dict(os.environ, found):
        yield
