"""`Case`: one attention call as a frozen description, and the tensors made from it.

A description prints and shrinks; its tensors are made by `Case.inputs()`, always the same ones.
Everything that no result may depend on (rows behind a sequence's end, unused pages) is NaN in
them, and tables of the variant are exactly as large as the problem where the strategies draw them.
"""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import attrs
import torch

from fa4core.testing.source import build
from fa4core.variant import Variant
from primitives import sequence
from primitives.sequence import Layout

LayoutKind = Literal["fixed", "seqused", "varlen", "varlen_seqused", "paged", "paged_varlen"]
Contents = Literal["normal", "large", "outliers", "constant", "zero"]
Strides = Literal["contiguous", "heads_first", "sliced", "misaligned", "expanded"]


def _each(accepted: object) -> Any:
    return attrs.validators.in_(get_args(accepted))


@attrs.frozen
class Limits:
    """Extents of the tables that a variant captures: no index of a problem reaches them."""

    batch: int = 1
    heads: int = 1
    seqlen_q: int = 1
    seqlen_k: int = 1


@attrs.frozen
class Shape:
    """Sizes of a call. `seqlens_q` and `seqlens_k` are the real lengths of each sequence."""

    seqlens_q: tuple[int, ...] = (1,)
    seqlens_k: tuple[int, ...] = (1,)
    heads_q: int = 1
    heads_kv: int = 1
    head_dim: int = 8
    head_dim_v: int = 8

    def __attrs_post_init__(self) -> None:
        if len(self.seqlens_q) != len(self.seqlens_k):
            raise ValueError(
                f"{len(self.seqlens_q)} query lengths and {len(self.seqlens_k)} key lengths; "
                "each sequence has one of each"
            )
        if self.heads_q % self.heads_kv:
            raise ValueError(f"heads_q={self.heads_q} is no multiple of heads_kv={self.heads_kv}")

    @property
    def batch(self) -> int:
        return len(self.seqlens_q)

    @property
    def limits(self) -> Limits:
        """The smallest tables that serve this shape; at least one entry each."""
        longest = (max(1, *lengths) for lengths in (self.seqlens_q, self.seqlens_k))
        return Limits(self.batch, self.heads_q, *longest)

    @property
    def is_uniform(self) -> bool:
        """Whether all sequences are of one length, as the fixed layout needs."""
        return len(set(self.seqlens_q)) <= 1 and len(set(self.seqlens_k)) <= 1


@attrs.frozen
class LayoutSpec:
    """How the sequences of a `Shape` lie in memory.

    Attributes:
        kind: Padded; padded with `seqused`; packed; packed with room behind each sequence; keys in
            pages with padded, or with packed, queries.
        page_size: Keys in a page.
        slack: Rows behind the longest sequence (seqused) or behind each (varlen_seqused).
    """

    kind: LayoutKind = attrs.field(default="fixed", validator=_each(LayoutKind))
    page_size: int = 16
    slack: int = 0


@attrs.frozen(eq=False)
class Inputs:
    """The tensors of a case. `q`, `k`, `v` and the variant's float tables require grad.

    `grad_out` and `grad_lse` are upstream gradients of the outputs, in their shapes.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layout: Layout | None
    variant: Variant
    grad_out: torch.Tensor
    grad_lse: torch.Tensor

    @property
    def learned(self) -> tuple[torch.Tensor, ...]:
        """The variant's captured tensors that require grad."""
        return tuple(t for t in self.variant.tensors if t.requires_grad)


@attrs.frozen
class Case:
    """One attention call: variant x shape x layout x dtype x data.

    Attributes:
        variant: Source text of a `Variant`; see `fa4core.testing.source`.
        shape: Lengths, heads, head dims.
        layout: Where the sequences lie.
        dtype: Of queries, keys and values: "float16", "bfloat16", "float32" or "float64".
        contents: Normal numbers; five times larger; with a few outliers; all equal; zero.
        strides: How q, k and v are strided.
        seed: Of the data.
    """

    variant: str = "Variant()"
    shape: Shape = Shape()
    layout: LayoutSpec = LayoutSpec()
    dtype: str = "float32"
    contents: Contents = attrs.field(default="normal", validator=_each(Contents))
    strides: Strides = attrs.field(default="contiguous", validator=_each(Strides))
    seed: int = 0

    def inputs(self, variant: Variant | None = None) -> Inputs:
        """The tensors, the same at every call; `variant` replaces the described one."""
        return _Maker(self).make(build(self.variant) if variant is None else variant)


class _Maker:
    """Makes a case's tensors: first each sequence's rows, then the layout around them."""

    def __init__(self, case: Case) -> None:
        self.case, self.shape = case, case.shape
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.generator = torch.Generator().manual_seed(case.seed)

    def make(self, variant: Variant) -> Inputs:
        s, kind = self.shape, self.case.layout.kind
        if kind == "fixed" and not s.is_uniform:
            raise ValueError(
                f"layout 'fixed' with lengths {s.seqlens_q} and {s.seqlens_k}; sequences of "
                "different lengths need another layout"
            )
        q = [self._numbers(n, s.heads_q, s.head_dim) for n in s.seqlens_q]
        k = [self._numbers(n, s.heads_kv, s.head_dim) for n in s.seqlens_k]
        v = [self._numbers(n, s.heads_kv, s.head_dim_v) for n in s.seqlens_k]
        out = [self._numbers(n, s.heads_q, s.head_dim_v, plain=True) for n in s.seqlens_q]
        lse = [self._numbers(n, s.heads_q, 1, plain=True).float() for n in s.seqlens_q]
        packed_q = kind in ("varlen", "varlen_seqused", "paged_varlen")
        place_q = self._packed if packed_q else self._padded
        room_q = self._room(s.seqlens_q) if kind != "paged_varlen" else s.seqlens_q
        if kind in ("paged", "paged_varlen"):
            table, (k_out, v_out) = self._paged([k, v])
            layout: Layout | None = sequence.paged(
                table,
                _int32(s.seqlens_k),
                cu_seqlens_q=_cumulative(room_q) if packed_q else None,
                seqused_q=None if packed_q else _int32(s.seqlens_q),
            )
        else:
            place_k, room_k = self._packed if packed_q else self._padded, self._room(s.seqlens_k)
            k_out, v_out = place_k(k, room_k), place_k(v, room_k)
            layout = self._layout(room_q, room_k)
        grad_lse = place_q(lse, room_q)[..., 0].transpose(-1, -2)
        return Inputs(
            q=self._strided(place_q(q, room_q)).requires_grad_(),
            k=self._strided(k_out).requires_grad_(),
            v=self._strided(v_out).requires_grad_(),
            layout=layout,
            variant=variant,
            grad_out=place_q(out, room_q),
            grad_lse=grad_lse.contiguous(),
        )

    def _layout(self, room_q: tuple[int, ...], room_k: tuple[int, ...]) -> Layout | None:
        kind, s = self.case.layout.kind, self.shape
        if kind == "fixed":
            return None
        used: dict[str, Any] = {"seqused_q": _int32(s.seqlens_q), "seqused_k": _int32(s.seqlens_k)}
        if kind == "seqused":
            return sequence.fixed(**used)
        ends = _cumulative(room_q), _cumulative(room_k)
        return sequence.varlen(*ends) if kind == "varlen" else sequence.varlen(*ends, **used)

    def _room(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Rows that each sequence has in the tensor."""
        kind, slack = self.case.layout.kind, self.case.layout.slack
        if kind in ("varlen_seqused",):
            return tuple(n + slack for n in lengths)
        if kind in ("seqused", "paged"):
            return (max(lengths, default=0) + slack,) * len(lengths)
        return lengths

    def _numbers(self, *shape: int, plain: bool = False) -> torch.Tensor:
        x = torch.randn(shape, generator=self.generator)
        if not plain:
            x = _SHAPED[self.case.contents](x, self.generator)
        return x.to(self.dtype)

    def _padded(self, rows: list[torch.Tensor], room: tuple[int, ...]) -> torch.Tensor:
        out = rows[0].new_full((len(rows), max(room), *rows[0].shape[1:]), math.nan)
        for i, r in enumerate(rows):
            out[i, : len(r)] = r
        return out

    def _packed(self, rows: list[torch.Tensor], room: tuple[int, ...]) -> torch.Tensor:
        out = rows[0].new_full((sum(room), *rows[0].shape[1:]), math.nan)
        start = 0
        for r, n in zip(rows, room, strict=True):
            out[start : start + len(r)] = r
            start += n
        return out

    def _paged(self, pair: list[list[torch.Tensor]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Pages in random order, two of them unused; unused table entries name page 0."""
        size = self.case.layout.page_size
        needed = [-(-n // size) for n in self.shape.seqlens_k]
        order = torch.randperm(sum(needed) + 2, generator=self.generator).tolist()
        table = torch.zeros(len(needed), max(1, *needed), dtype=torch.int32)
        tensors = [r[0].new_full((len(order), size, *r[0].shape[1:]), math.nan) for r in pair]
        for i, pages in enumerate(needed):
            for j in range(pages):
                table[i, j] = page = order.pop()
                for out, rows in zip(tensors, pair, strict=True):
                    chunk = rows[i][j * size : (j + 1) * size]
                    out[page, : len(chunk)] = chunk
        return table, tensors

    def _strided(self, x: torch.Tensor) -> torch.Tensor:
        strides = self.case.strides
        if strides == "heads_first":  # memory order (..., heads, seqlen, d)
            return x.transpose(-2, -3).contiguous().transpose(-2, -3)
        if strides == "sliced":  # every second row of a wider tensor
            wide = x.new_full((*x.shape[:-3], 2 * x.shape[-3], x.shape[-2], x.shape[-1]), math.nan)
            wide[..., ::2, :, :] = x
            return wide[..., ::2, :, :]
        if strides == "misaligned":  # one element behind a 16-byte boundary, rows of d + 1
            flat = x.new_full((*x.shape[:-1], x.shape[-1] + 1), math.nan)
            flat[..., 1:] = x
            return flat[..., 1:]
        if strides == "expanded":  # all heads are one, with stride 0
            return x[..., :1, :].contiguous().expand(x.shape)
        return x


def _outliers(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.where(torch.rand(x.shape, generator=generator) < 0.01, 25.0 * x, x)


_SHAPED = {
    "normal": lambda x, _: x,
    "large": lambda x, _: 5.0 * x,
    "outliers": _outliers,
    "constant": lambda x, _: torch.full_like(x, 0.5),
    "zero": lambda x, _: torch.zeros_like(x),
}


def _int32(values: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _cumulative(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
