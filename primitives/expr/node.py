"""The nodes of the expression graph: what a mask or score function becomes after tracing.

A node is an interned value: building the same node twice gives the same object, so identity is
equality and sharing is automatic. Nodes are built through `primitives.expr.algebra`, which keeps
them canonical; this file only stores them. It knows torch for dtypes and nothing of attention.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

import torch

Kind = Literal["bool", "int", "float"]

#: The variables of a mask or score function, in their printed order, and the factor on q . k that
#: kernels put into a score mod. The last two are floats.
VARIABLES = ("b", "h", "q", "k", "seqlen_q", "seqlen_k", "score", "scale")


def kind_of(dtype: torch.dtype) -> Kind:
    """The kind a torch dtype belongs to. Complex and quantised dtypes raise `TypeError`."""
    if dtype == torch.bool:
        return "bool"
    if dtype.is_floating_point:
        return "float"
    if dtype.is_complex or dtype in (torch.qint8, torch.quint8, torch.qint32):
        raise TypeError(f"dtype {dtype} has no place in a mask or score function; use a real dtype")
    return "int"


class Capture:
    """A tensor that a function closes over: a run-time argument of the kernel, never a constant.

    Two captures are the same exactly if they hold the same tensor object. A 0-d tensor on the CPU
    is a scalar: its value is known to the host and may change from call to call.
    """

    __slots__ = ("__weakref__", "dtype", "kind", "rank", "serial", "tensor")

    _interned: ClassVar[weakref.WeakValueDictionary[int, Capture]] = weakref.WeakValueDictionary()
    _serials: ClassVar[Iterator[int]] = itertools.count()

    tensor: torch.Tensor | None
    dtype: torch.dtype
    rank: int
    kind: Kind
    serial: int  # captures are numbered as they are made

    def __new__(cls, tensor: torch.Tensor) -> Capture:
        known = cls._interned.get(id(tensor))
        if known is not None and known.tensor is tensor:
            return known
        self = object.__new__(cls)
        self.tensor, self.dtype, self.rank = tensor, tensor.dtype, tensor.dim()
        self.kind, self.serial = kind_of(tensor.dtype), next(cls._serials)
        cls._interned[id(tensor)] = self
        return self

    @classmethod
    def placeholder(cls, dtype: torch.dtype, rank: int) -> Capture:
        """A capture without a tensor, for graphs read back from text."""
        self = object.__new__(cls)
        self.tensor, self.dtype, self.rank, self.kind = None, dtype, rank, kind_of(dtype)
        self.serial = next(cls._serials)
        return self

    def __reduce__(self) -> tuple:
        if self.tensor is None:
            return Capture.placeholder, (self.dtype, self.rank)
        return Capture, (self.tensor,)

    @property
    def is_scalar(self) -> bool:
        """Whether the host knows the value (0-d, on the CPU)."""
        return self.rank == 0 and self.tensor is not None and self.tensor.device.type == "cpu"

    @property
    def signature(self) -> str:
        """What a kernel must know of it at compile time, e.g. `float32[2]`."""
        return f"{str(self.dtype).removeprefix('torch.')}[{self.rank}]"

    def __repr__(self) -> str:
        if self.is_scalar:
            return str(self.tensor.item())  # type: ignore[union-attr]
        shape = "" if self.tensor is None else str(tuple(self.tensor.shape))
        return f"{self.signature}{shape}"


class Node:
    """One operation of the graph.

    `op` names the operation, `args` are its operands, `attr` its compile-time attribute (the value
    of a constant, the name of a variable, the coefficients of a linear form, the capture of a
    gather), `kind` the kind of its result. `digest` identifies the structure, ignoring which
    tensors are captured, and is the same in every process.
    """

    __slots__ = ("__weakref__", "args", "attr", "digest", "free", "kind", "op")

    _interned: ClassVar[weakref.WeakValueDictionary[tuple, Node]] = weakref.WeakValueDictionary()

    op: str
    args: tuple[Node, ...]
    attr: Any
    kind: Kind
    digest: bytes
    free: frozenset[str]

    def __new__(cls, op: str, args: Iterable[Node], kind: Kind, attr: Any = None) -> Node:
        args = tuple(args)
        # 0.0 and -0.0, 1 and True are equal but not the same constant.
        stamp = attr.hex() if isinstance(attr, float) else type(attr)
        key = (op, args, kind, attr, stamp)
        known = cls._interned.get(key)
        if known is not None:
            return known
        self = object.__new__(cls)
        self.op, self.args, self.kind, self.attr = op, args, kind, attr
        shown = attr.signature if isinstance(attr, Capture) else repr(attr)
        text = f"{op}|{kind}|{shown}|".encode() + b"".join(a.digest for a in args)
        self.digest = hashlib.blake2b(text, digest_size=12).digest()
        own = {attr} if op == "var" else set()
        self.free = frozenset(own.union(*(a.free for a in args)))
        cls._interned[key] = self
        return self

    def __reduce__(self) -> tuple:
        return Node, (self.op, self.args, self.kind, self.attr)

    @property
    def is_const(self) -> bool:
        return self.op == "const"

    def __repr__(self) -> str:
        from primitives.expr.text import pretty

        return pretty(self)


def walk(*roots: Node) -> Iterator[Node]:
    """Every node reachable from `roots` once, operands before their users, in canonical order."""
    seen: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(r, False) for r in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(node.args) if a not in seen)


def captures(*roots: Node) -> tuple[Capture, ...]:
    """The captures below `roots`, each once, in order of first use: the slots of a kernel."""
    found: dict[Capture, None] = {}
    for node in walk(*roots):
        if node.op == "gather":
            found.setdefault(node.attr)
    return tuple(found)
