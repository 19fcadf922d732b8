"""Device memory as the session sees it: torch CPU storages, and which of them nothing has written.

A storage is one `Allocation`. It becomes known when its address may reach a kernel. It counts as
unwritten from ``torch.empty`` and the like until a torch operation mutates it; from then on, and
for what kernels write, the machine keeps its own byte-wise record. Storages are kept alive while
something else than this table uses them, so that an address never changes its meaning unseen.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fa4core.compile.environment import exclusive
from fa4core.emulator.launch import Allocation
from fa4core.emulator.machine import Machine

_EMPTY = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
        torch.ops.aten.empty_permuted.default,
    }
)


_MANY = 1_000  # unwritten storages, before those that are gone are looked for


def _alone(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, never while another thread launches: the machine reads what it changes."""

    @functools.wraps(method)
    def locked(*arguments: Any) -> Any:
        with exclusive:
            return method(*arguments)

    return locked


class Memory:
    """The storages of one session."""

    def __init__(self, machine: Machine, keep: bool):
        self._machine = machine
        self._keep = keep  # never forget a storage: a replay needs them all
        self._unwritten: dict[int, torch.UntypedStorage] = {}
        self._known: dict[int, torch.UntypedStorage] = {}
        self._registered: dict[int, Allocation] = {}
        self._seen: dict[int, tuple[int, Allocation]] = {}

    @_alone
    def created_empty(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._unwritten[storage.data_ptr()] = storage
        if len(self._unwritten) > _MANY:
            self.sweep()

    @_alone
    def written(self, tensor: torch.Tensor) -> None:
        """A torch operation has written this tensor's storage."""
        address = tensor.untyped_storage().data_ptr()
        if self._unwritten.pop(address, None) is not None and address in self._known:
            self._register(self._known[address], self._registered[address].name, True)

    @_alone
    def exported(
        self, tensor: torch.Tensor, name: str = "", initialised: bool | None = None
    ) -> None:
        """The tensor's address may reach a kernel. initialised: what the table says, if None."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not storage.nbytes() or (address in self._known and initialised is None and not name):
            return
        if initialised is None:
            initialised = address not in self._unwritten
        if not initialised:
            self._unwritten[address] = storage
        self._known[address] = storage
        self._register(storage, name or _description(tensor), initialised)

    def _register(self, storage: torch.UntypedStorage, name: str, initialised: bool) -> None:
        allocation = Allocation(storage.data_ptr(), storage.nbytes(), name, initialised)
        self._registered[allocation.address] = allocation
        self._machine.register(allocation)

    def changes(self) -> tuple[tuple[Allocation, bytes], ...]:
        """Storages whose contents or state changed since the last call, with their contents now."""
        found = []
        for address, storage in self._known.items():
            data = ctypes.string_at(address, storage.nbytes())
            state = (hash(data), self._registered[address])
            if self._seen.get(address) != state:
                self._seen[address] = state
                found.append((self._registered[address], data))
        return tuple(found)

    @_alone
    def sweep(self) -> None:
        """Forget storages that only this table still holds."""
        for address, storage in list(self._unwritten.items()):
            if address not in self._known and _unused(storage):
                del self._unwritten[address]
        if self._keep:
            return
        for address, storage in list(self._known.items()):
            if _unused(storage):
                del self._known[address], self._registered[address]
                self._unwritten.pop(address, None)
                self._machine.forget(address)


def _description(tensor: torch.Tensor) -> str:
    """What reports call a tensor without a name, e.g. "bfloat16[1, 256, 2, 128]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _unused(storage: torch.UntypedStorage) -> bool:
    """Whether no tensor refers to a storage any more (the tables share one reference)."""
    return torch._C._storage_Use_Count(storage._cdata) <= 1


class WatchTorch(TorchDispatchMode):
    """Tells `Memory` what torch allocates without writing, and what it writes."""

    def __init__(self, memory: Memory):
        super().__init__()
        self._memory = memory

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile may compile inside a session; what compiled code runs is seen."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _EMPTY:
            self._memory.created_empty(result)
        elif func._schema.is_mutable:
            for position, argument in enumerate(func._schema.arguments):
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                value = kwargs.get(argument.name)
                if value is None and position < len(args):
                    value = args[position]
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(tensor, torch.Tensor):
                        self._memory.written(tensor)
        return result
