"""`Mask`: a boolean function of (b, h, q_idx, kv_idx) as a value, and its algebra."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from primitives.expr import Node, algebra, captures, dump, fingerprint, pretty, substitute
from primitives.expr.errors import name_of
from primitives.expr.reuse import trace_prebuilt
from primitives.expr.trace import trace
from primitives.scalar import parameter

VARIABLES = ("b", "h", "q", "k")

MaskFunction = Callable[..., torch.Tensor]


@attrs.frozen(eq=False, repr=False)
class Mask:
    """Which keys a query attends to; `True` attends.

    Masks combine with `&`, `|`, `~`, `^` and `-` (this but not that). Two masks are equal if their
    canonical graphs are and they hold the same tensors and the same scalar values; `mask.key` is
    the part of it that a kernel is compiled for.
    """

    expr: Node
    name: str = "mask"

    # ---------------------------------------------------------------------------- algebra

    def __and__(self, other: Mask) -> Mask:
        return self._combine("&", other, algebra.logical_and)

    def __or__(self, other: Mask) -> Mask:
        return self._combine("|", other, algebra.logical_or)

    def __xor__(self, other: Mask) -> Mask:
        return self._combine("^", other, algebra.logical_xor)

    def __sub__(self, other: Mask) -> Mask:
        return self._combine(
            "-", other, lambda a, b: algebra.logical_and(a, algebra.logical_not(b))
        )

    def __invert__(self) -> Mask:
        return Mask(algebra.logical_not(self.expr), f"~{self.name}")

    def _combine(self, sign: str, other: Mask, operation: Callable[[Node, Node], Node]) -> Mask:
        if not isinstance(other, Mask):
            hint = " Wrap a function with mask.define." if callable(other) else ""
            raise TypeError(f"{sign} combines two masks; got {type(other).__name__}.{hint}")
        return Mask(operation(self.expr, other.expr), f"({self.name} {sign} {other.name})")

    def shift(self, q: int | torch.Tensor = 0, k: int | torch.Tensor = 0) -> Mask:
        """The mask moved by `q` queries and `k` keys: the new (q, k) asks the old (q - q0, k - k0).

        Offsets are run-time scalars: a new one compiles nothing. Indices before the start are
        asked as negative indices, which captured tensors read from their end, as in torch.
        """
        moved = {}
        for name, offset in (("q", q), ("k", k)):
            if isinstance(offset, torch.Tensor) or offset != 0:
                capture = algebra.Capture(parameter(offset))
                moved[algebra.var(name)] = algebra.sub(algebra.var(name), algebra.gather(capture))
        (expr,) = substitute([self.expr], moved)
        return Mask(expr, f"{self.name}.shift({q}, {k})")

    def restrict(
        self, *, q: tuple[int, int] | None = None, k: tuple[int, int] | None = None
    ) -> Mask:
        """The mask inside a half-open range of queries and of keys, nothing attended outside."""
        return self & _box("inside", q, k)

    def rename(self, name: str) -> Mask:
        """The same mask with a name of its own, as `explain` shows it. Names are no identity."""
        return attrs.evolve(self, name=name)

    # ----------------------------------------------------------------------------- value

    @property
    def key(self) -> str:
        """Canonical text: equal for masks that share a kernel."""
        return dump([self.expr])

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The captured tensors and scalars, in the order of the key's slots."""
        return tuple(c.tensor for c in captures(self.expr) if c.tensor is not None)

    def _identity(self) -> tuple:
        return self.key, fingerprint(self.expr)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __bool__(self) -> bool:
        raise TypeError(
            "a mask has no truth value: combine masks with `&`, `|`, `~` instead of "
            "`and`, `or`, `not`, and test for equality with `==`"
        )

    def __repr__(self) -> str:
        return f"Mask({self.name}: {pretty(self.expr)})"


def _box(name: str, q: tuple[int, int] | None, k: tuple[int, int] | None) -> Mask:
    expr: Node = algebra.TRUE
    for variable, bounds in (("q", q), ("k", k)):
        if bounds is None:
            continue
        start, stop = bounds
        index = algebra.var(variable)
        inside = algebra.logical_and(algebra.less_equal(start, index), algebra.less(index, stop))
        expr = algebra.logical_and(expr, inside)
    return Mask(expr, name)


def define(function: MaskFunction) -> Mask:
    """Make a mask of a plain Python function; FlexAttention's `mask_mod` functions work unchanged.

    Args:
        function: `function(b, h, q_idx, kv_idx) -> bool tensor`. Indices are 0-d integer tensors,
            local to the sequence. It may close over tensors (run-time arguments of the kernel)
            and may ask for keyword-only `seqlen_q` and `seqlen_k`. Plain Python numbers it closes
            over are compiled in; wrap them with `primitives.parameter` to keep them run-time.

    Raises:
        DefinitionError: The function can't be traced, has another signature, or returns something
            that is not a truth value.
    """
    if isinstance(function, Mask):
        return function
    expr = trace(function, VARIABLES, "mask")
    return Mask(expr, name_of(function))


def named(name: str, function: MaskFunction) -> Mask:
    """A prebuilt mask: `define` with a readable name, tracing once for all run-time sizes."""
    return Mask(trace_prebuilt(function, VARIABLES, "mask"), name)


def _check_mask(what: str, name: str, given: object) -> None:
    if not isinstance(given, Mask):
        hint = " Wrap a function with mask.define." if callable(given) else ""
        raise TypeError(f"{what} takes masks; {name} is a {type(given).__name__}.{hint}")


def per_head(masks: Sequence[Mask]) -> Mask:
    """Head `h` takes `masks[h]`; heads beyond the list take the last one."""
    if not isinstance(masks, Sequence):
        raise TypeError(
            f"per_head takes a sequence of masks, one a head; got {type(masks).__name__}"
        )
    for i, given in enumerate(masks):
        _check_mask("per_head", f"masks[{i}]", given)
    if not masks:
        raise ValueError("per_head needs at least one mask; got an empty sequence")
    expr = masks[-1].expr
    for head in range(len(masks) - 2, -1, -1):
        here = algebra.equal(algebra.var("h"), head)
        expr = algebra.where(here, masks[head].expr, expr)
    return Mask(expr, f"per_head({', '.join(m.name for m in masks)})")


def select(heads: Sequence[bool] | torch.Tensor, chosen: Mask, otherwise: Mask) -> Mask:
    """Heads where `heads` is true take `chosen`, the others `otherwise`; the table is run-time."""
    _check_mask("select", "chosen", chosen)
    _check_mask("select", "otherwise", otherwise)
    table = torch.as_tensor(heads)
    if table.dtype != torch.bool or table.dim() != 1:
        raise TypeError(
            f"select needs a 1-d bool table, one entry a head; got {table.dtype} of shape "
            f"{tuple(table.shape)}"
        )
    condition = algebra.gather(algebra.Capture(table), [algebra.var("h")])
    expr = algebra.where(condition, chosen.expr, otherwise.expr)
    return Mask(expr, f"select({chosen.name}, {otherwise.name})")
